"""Rows of gradients, mixed precision, the trainer and uneven ranks; see `test_contract_coverage.py`."""

from __future__ import annotations

from tests.contract.coverage_row import Later, Row, shown

ACCUMULATION = "tests/training/gradients/test_accumulation.py"
AVERAGES = "tests/training/test_averages.py"
CHECK = "tests/cli/test_check.py"
EQUIVALENCE = "tests/training/test_equivalence.py"
EVALUATION = "tests/training/test_evaluation.py"
GROUPS = "tests/training/groups/test_dp_group.py"
LOADER = "tests/dropin/test_distributed_loader.py"
MANAGER = "tests/training/precision/test_manager.py"
MESH = "tests/contract/test_contract_mesh.py"
OVERLAP = "tests/training/gradients/test_overlap.py"
PREFETCH = "tests/training/test_device_prefetch.py"
RUN = "tests/training/test_run.py"
SAMPLER = "tests/dropin/test_sampler.py"
SYNCHRONIZER = "tests/training/gradients/test_synchronizer.py"
TRANSFORMS = "tests/training/precision/test_transforms.py"

DIAGNOSIS = Later(
    "a verdict in words on where time goes",
    "the numbers are there: `batch.wait_s` and its cause, the rates of every stage; nothing reads the use of a GPU",
)

ROWS: dict[str, Row] = {
    # The whole
    "C001": shown(
        "the parts are imported from one place, and the command has help",
        "tests/test_public_api.py::test_the_package_offers_what_it_lists",
        "tests/cli/test_preprocess.py::test_help_is_there_at_once",
    ),
    "C002": shown(
        "from packed rows to a loss: dataset, sampler, collator, model",
        "tests/training/test_packed_files.py::test_rows_of_a_packed_file_train_a_model_in_the_order_of_the_sampler",
    ),
    "C003": shown("ranks hold the same bits after five steps", f"{MANAGER}::test_both_ranks_hold_the_same_bits_after_five_steps"),
    "C021": shown(
        "batches are copied to the device ahead of their step (the copy stream: tests/training/gpu_check.py, on a GPU)",
        f"{PREFETCH}::test_the_real_loader_goes_on_after_the_batch_in_hand",
        "tests/training/test_trainer.py::test_batches_taken_ahead_change_nothing",
        "tests/contract/test_contract_memory.py::test_moving_a_batch",
    ),
    # A step
    "C022": shown(
        "micro-batches have the gradient of one big batch",
        f"{MANAGER}::test_the_mean_over_micro_batches_equals_one_big_batch",
        f"{SYNCHRONIZER}::test_accumulated_gradients_equal_those_of_one_process",
    ),
    "C023": shown(
        "gradients add up in the dtype of the parameter, or more exactly in float32",
        f"{ACCUMULATION}::test_a_bfloat16_sum_of_equal_terms_stands_still_and_a_float32_one_does_not",
        f"{OVERLAP}::test_wide_sums_of_narrow_gradients_are_exact",
    ),
    "C024": shown(
        "one round of communication in a step, however many micro-batches",
        f"{SYNCHRONIZER}::test_one_round_whatever_the_number_of_micro_batches",
        f"{OVERLAP}::test_accumulation_divides_the_bytes",
    ),
    "C025": shown("and it is that of the last", f"{SYNCHRONIZER}::test_only_the_last_micro_batch_communicates"),
    "C026": shown(
        "the average over the data-parallel group, in bfloat16 where asked for",
        f"{SYNCHRONIZER}::test_bfloat16_on_the_wire_halves_the_bytes",
        f"{GROUPS}::test_ranks_of_one_tensor_parallel_place_form_a_group",
    ),
    "C027": shown("the same on all ranks, bit for bit", f"{SYNCHRONIZER}::test_gradients_are_the_same_bits_on_all_ranks_and_in_every_run"),
    "C028": shown("gradients become float32", f"{MANAGER}::test_transforms_run_in_order_on_scaled_float32_gradients"),
    "C029": shown("a gradient of another shape is refused", f"{MANAGER}::test_a_gradient_that_does_not_fit_its_parameter_is_refused"),
    "C030": shown(
        "clipping as torch does it, also over tensor-parallel ranks",
        f"{TRANSFORMS}::test_it_clips_as_torch_does_to_the_bit",
        f"{TRANSFORMS}::test_the_norm_over_tensor_parallel_ranks_is_that_of_the_dense_model",
    ),
    "C031": shown(
        "the optimizer steps masters, and parameters are the masters rounded",
        f"{MANAGER}::test_parameters_are_the_rounded_masters_and_gradients_are_gone_after_every_step",
        f"{MANAGER}::test_twenty_steps_give_the_same_bits_as_a_loop_written_by_hand",
    ),
    "C032": shown(
        "gradients are cleared, and the schedule goes on once for each step",
        f"{MANAGER}::test_parameters_are_the_rounded_masters_and_gradients_are_gone_after_every_step",
        f"{MANAGER}::test_the_scheduler_goes_on_once_for_each_optimizer_step_and_not_for_a_skipped_one",
    ),
    # Synchronization
    "C055": shown("without it, replicas become different models", f"{OVERLAP}::test_without_synchronization_replicas_differ"),
    "C056": shown("accumulation divides the traffic", f"{OVERLAP}::test_accumulation_divides_the_bytes"),
    "C057": shown("one rank communicates nothing", f"{SYNCHRONIZER}::test_alone_nothing_is_communicated"),
    "C058": shown(
        "the same collectives whatever was used",
        f"{SYNCHRONIZER}::test_a_parameter_used_on_one_rank_is_averaged_on_both",
        f"{OVERLAP}::test_what_is_late_on_one_rank_is_sent_again_by_all",
    ),
    "C059": shown(
        "long sums in bfloat16 are warned of, and float32 is exact",
        f"{ACCUMULATION}::test_a_bfloat16_sum_of_equal_terms_stands_still_and_a_float32_one_does_not",
        f"{ACCUMULATION}::test_sums_that_can_hold_their_terms_are_not_warned_of",
    ),
    "C060": shown(
        "(8, 1), (4, 2) and (2, 4) agree to a millionth (all cells: python -m tests.training.equivalence_table)",
        f"{EQUIVALENCE}::test_accumulation_changes_neither_gradients_nor_losses",
        f"{EQUIVALENCE}::test_gradients_and_parameters_agree_to_a_millionth",
    ),
    "C061": shown(
        "bfloat16 on the wire: half the bytes, and losses that hardly drift in 50 steps",
        f"{SYNCHRONIZER}::test_losses_hardly_drift_with_bfloat16_on_the_wire",
        f"{SYNCHRONIZER}::test_bfloat16_on_the_wire_halves_the_bytes",
    ),
    "C062": shown(
        "a rank that does not take part is an error that names it and the operation",
        f"{SYNCHRONIZER}::test_a_missing_rank_ends_the_wait_with_its_circumstances",
        f"{OVERLAP}::test_ranks_that_wait_for_different_things_are_told_so",
    ),
    "C063": shown(
        "configurations of ranks are compared, by a command and at the start",
        f"{CHECK}::test_states_of_different_configurations_are_told_apart",
        f"{CHECK}::test_the_states_of_one_run_belong_together",
        f"{MESH}::test_ranks_that_do_not_fit_all_say_so",
    ),
    # How busy the GPU is
    "D020": Row("low utilisation is blamed on the data only where the data are waited for", DIAGNOSIS),
    "D021": Row("and then more workers and mapped files are advised", DIAGNOSIS),
    # Uneven ranks
    "K65": shown(
        "evaluation counts each sample once",
        f"{EVALUATION}::test_ten_samples_on_three_ranks_count_ten",
        f"{EVALUATION}::test_records_that_are_repeated_to_even_out_ranks_are_refused",
        f"{LOADER}::test_evaluation_over_uneven_ranks_counts_each_sample_once",
    ),
    "K66": shown("ranks with a barrier in each step all get to the end", f"{LOADER}::test_real_ranks_take_equally_many_steps"),
    "K67": shown(
        "what a split leaves out is told, and evaluation leaves out nothing",
        f"{SAMPLER}::test_what_is_dropped_and_what_is_repeated_is_told",
        f"{LOADER}::test_every_rank_takes_equally_many_steps",
    ),
    "K68": shown(
        "a slow rank keeps its records when a fast one is done", f"{LOADER}::test_a_slow_rank_keeps_its_records_when_a_fast_one_is_done"
    ),
    # Accumulation
    "K69": shown("the last micro-batch communicates, not the first", f"{SYNCHRONIZER}::test_only_the_last_micro_batch_communicates"),
    "K70": shown(
        "a rank without a gradient neither hangs the others nor drifts",
        f"{SYNCHRONIZER}::test_a_parameter_used_on_one_rank_is_averaged_on_both",
    ),
    "K71": shown("no average of averages", f"{RUN}::test_the_loss_is_weighted_by_tokens_however_samples_are_cut"),
    "K72": shown("gradients are clipped once they are synchronized", f"{SYNCHRONIZER}::test_clipping_follows_synchronization"),
    # Half precision
    "K73": shown(
        "half precision does not overflow in the sum",
        f"{SYNCHRONIZER}::test_half_precision_does_not_overflow",
        f"{MANAGER}::test_float16_gradients_whose_sum_overflows_are_averaged",
    ),
    "K74": shown(
        "sparse gradients are refused",
        "tests/training/gradients/test_model_checks.py::test_layers_with_sparse_gradients_are_refused",
        f"{OVERLAP}::test_a_sparse_gradient_on_one_rank_ends_the_step_on_all",
    ),
    # Counting
    "K79": shown(
        "padding is no throughput, and totals go on after a resume",
        "tests/contract/test_contract_faults_batches.py::test_real_tokens_and_slots_are_separate_figures_and_totals_go_on_after_a_resume",
        f"{AVERAGES}::test_rates_of_a_step",
        f"{RUN}::test_padding_and_losses_are_reported",
    ),
}
