"""Rows of packing, masks, buckets, balance, trajectories and mixtures; see `test_contract_coverage.py`."""

from __future__ import annotations

from tests.contract.coverage_row import Later, NotApplicable, Row, shown

BALANCING = "tests/batching/test_balancing.py"
BUCKET = "tests/batching/test_bucket.py"
CONTEXT = "tests/collate/test_context_parallel.py"
ELASTIC = "tests/contract/test_contract_elastic.py"
FAULTS = "tests/contract/test_contract_faults_batches.py"
MASKS = "tests/collate/test_masks.py"
MIXED = "tests/order/test_mixed.py"
PACK = "tests/batching/test_pack.py"
PRETRAIN = "tests/collate/test_pretrain.py"
RESUME = "tests/contract/test_contract_resume.py"
SFT = "tests/collate/test_sft.py"
TOKEN_BUDGET = "tests/batching/test_token_budget.py"
TRAJECTORY = "tests/batching/test_trajectory.py"

COMMON = Later(
    "one bucket or source for all ranks in a step", "each lane batches its own records, so that global batches do not depend on the ranks"
)
REPORT = Later(
    "report on the data", "its numbers are counted for each lane: tokens, padding, rows and pieces; sources are named by `batch.samples`"
)

ROWS: dict[str, Row] = {
    # Packing and masks
    "K22": shown(
        "the packer ends an epoch empty, and nothing is lost",
        f"{FAULTS}::test_each_epoch_ends_with_all_documents_and_leaves_the_packer_empty",
    ),
    "K23": shown("no token predicts the first of the next document", f"{PRETRAIN}::test_no_token_predicts_across_a_border"),
    "K24": shown(
        "tokens of a long document are delivered or reported",
        f"{FAULTS}::test_tokens_of_a_long_document_are_delivered_or_reported",
        f"{FAULTS}::test_a_long_document_that_is_an_error_is_named",
    ),
    "K25": shown(
        "short samples stay, a long one is cut or refused",
        f"{SFT}::test_truncation_keeps_the_first_tokens_and_all_short_samples",
        f"{SFT}::test_a_long_sample_is_refused_with_its_length_and_the_limit",
    ),
    "K26": shown(
        "borders of a slice count inside it",
        f"{CONTEXT}::test_local_borders_are_the_global_ones_divided",
        f"{CONTEXT}::test_borders_of_the_whole_are_kept_under_names_that_no_local_kernel_takes",
    ),
    "K27": shown("no empty segment reaches a slice", f"{CONTEXT}::test_each_document_by_itself"),
    "K28": shown("documents with and without a loss mask share a row", f"{PRETRAIN}::test_documents_with_and_without_a_loss_mask"),
    "K29": Row("placeholders and features match", Later("multimodal collator", "there is none so far")),
    # Buckets
    "K30": shown("one sample over the budget harms no other", f"{FAULTS}::test_one_sample_over_the_budget_late_in_the_epoch"),
    "K31": Row("ranks are in one bucket at each step", COMMON),
    "K32": shown("batches do not come sorted by length", f"{FAULTS}::test_batches_of_sorted_data_do_not_come_sorted"),
    # Mixtures
    "K33": shown(
        "the shortest source does not end what is to be gone through", f"{FAULTS}::test_sources_that_are_not_repeated_are_all_gone_through"
    ),
    "K34": shown("a shuffle does not change when a mixture ends", f"{FAULTS}::test_a_shuffle_does_not_change_when_a_mixture_ends"),
    "K35": Row("ranks are in one source at each step", COMMON),
    # From data to a model
    "A028": shown(
        "file, alignment, dealing, preprocessing, collator, model",
        "tests/dropin/test_chain.py::test_the_chain_trains_a_model_on_all_rows_of_all_ranks",
        f"{FAULTS}::test_a_file_of_talks_becomes_what_a_model_trains_on_and_each_row_tells_its_lines",
    ),
    "B008": shown(
        "a packed document gives the logits that it gives alone", f"{MASKS}::test_logits_of_a_packed_document_are_those_of_it_alone"
    ),
    "B041": shown("rows are planned from lengths alone", "tests/batching/test_pack_fit.py::test_rows_are_those_of_the_lengths_alone"),
    "B047": shown("another row length is refused on resume", f"{FAULTS}::test_another_row_length_is_refused_on_resume"),
    "B050": shown(
        "best fit fills rows and cuts nothing",
        "tests/batching/test_bins.py::test_best_fit_uses_99_5_percent_of_rows",
        "tests/batching/test_pack_fit.py::test_no_document_that_fits_is_cut_and_no_token_is_lost",
    ),
    "B060": shown("rows and the documents in them are counted", f"{PACK}::test_rows_their_tokens_and_documents_are_counted"),
    "B079": shown(
        "a half-filled packer is restored",
        f"{RESUME}::test_resuming_at_every_batch_gives_the_tail",
        f"{ELASTIC}::test_a_chain_of_resumes_on_other_numbers_of_ranks",
    ),
    "B088": Row(
        "packing is quick",
        NotApplicable("tests are never timed; tests/benchmarks/packing_table.py prints microseconds per document"),
    ),
    "B104": shown(
        "masks, borders, positions and labels of packed rows",
        f"{MASKS}::test_array_tensor_and_flex_function_say_the_same",
        f"{MASKS}::test_a_mask_that_leaks_would_be_noticed",
        f"{PRETRAIN}::test_segments_cover_the_tokens_and_labels_stay_inside_them",
    ),
    "B115": shown(
        "masks of loss and attention have tests",
        f"{MASKS}::test_a_mask_by_hand",
        f"{SFT}::test_three_ways_to_say_what_is_trained",
    ),
    "B117": shown(
        "a row tells its records",
        f"{FAULTS}::test_a_file_of_talks_becomes_what_a_model_trains_on_and_each_row_tells_its_lines",
    ),
    # Buckets, budgets, balance
    "B010": shown(
        "a step's batches cost alike on all ranks", f"{BALANCING}::test_a_step_of_few_long_and_short_items_is_even_within_ten_percent"
    ),
    "B013": Row("what buckets do to the distribution is reported", REPORT),
    "B048": shown("buckets pad less", f"{BUCKET}::test_buckets_pad_much_less_than_fixed_batches"),
    "B049": shown("the samples of a batch share a bucket", f"{BUCKET}::test_groups_are_of_one_bucket_in_order_and_within_its_limit"),
    "B052": shown(
        "no batch exceeds its tokens",
        f"{TOKEN_BUDGET}::test_no_group_exceeds_its_limits_and_none_could_take_the_next_sample",
        f"{TOKEN_BUDGET}::test_the_cost_is_what_the_collator_makes_of_it",
        f"{FAULTS}::test_one_sample_over_the_budget_late_in_the_epoch",
    ),
    "B053": shown("over-long samples are alone, and counted", f"{BUCKET}::test_over_long_samples_are_alone_at_once"),
    "B055": shown("the cost is tokens, or their square", f"{BALANCING}::test_quadratic_cost_counts_what_attention_does"),
    "B056": shown("one sample of 300000 tokens", f"{BALANCING}::test_one_item_of_300000_tokens_gets_a_part_as_light_as_can_be"),
    "B057": shown(
        "tokens of each rank, side by side",
        "tests/training/test_stragglers.py::test_a_sum_over_the_ranks_gathers_their_means",
        "tests/training/test_stragglers.py::test_uneven_tokens_are_named",
    ),
    "B058": shown("padding is counted from masks", "tests/collate/test_counts.py::test_counts_by_the_first_field_that_tells"),
    "B059": Row("lengths of packed rows", REPORT),
    "B061": Row("shares of domains and lengths", REPORT),
    "B062": shown(
        "loading and step times of each rank, side by side", "tests/training/test_run.py::test_a_slow_rank_is_named_on_all_and_logged_once"
    ),
    "B103": shown("token totals of ranks differ by less than 2 percent", f"{BALANCING}::test_64_items_a_part_are_even_within_two_percent"),
    "B105": shown("buckets do not change a mixture's shares", f"{FAULTS}::test_buckets_do_not_change_the_shares_of_a_mixture"),
    # Agents' trajectories
    "B054": shown(
        "trajectories are kept whole and then batched",
        f"{TRAJECTORY}::test_a_trajectory_goes_through_pack_and_collator_uncut",
        f"{BUCKET}::test_groups_are_of_one_bucket_in_order_and_within_its_limit",
    ),
    "B063": shown("all nine parts go through and come back", f"{TRAJECTORY}::test_nine_parts_go_through_and_come_back"),
    "B064": shown(
        "what is left after cutting has its tools",
        f"{TRAJECTORY}::test_whole_turns_are_left_out_oldest_first_and_the_prefix_stays",
        f"{TRAJECTORY}::test_what_cannot_fit_with_its_prefix_is_left_out_or_refused",
    ),
    "B065": shown("messages keep what wraps them", f"{TRAJECTORY}::test_structure_is_kept_whatever_is_cut"),
    "B066": shown("the loss covers what the model says", f"{TRAJECTORY}::test_the_loss_covers_exactly_what_the_model_says"),
    "B067": shown(
        "long observations are cut, thinned or summarised",
        f"{TRAJECTORY}::test_an_observation_of_100_000_tokens_becomes_as_long_as_fits_and_nothing_else_changes",
        f"{TRAJECTORY}::test_a_function_can_summarise",
    ),
    "B068": Row(
        "trajectory, step and quality are told of each segment",
        Later(
            "what a sample says about itself",
            "a batch tells each sample's shard and row, and with them its record; packed rows take per-token fields only",
        ),
    ),
    "B069": shown("shares of domains are those asked for", f"{MIXED}::test_realised_counts_follow_the_weights"),
    "B070": shown("long trajectories are balanced", f"{BALANCING}::test_a_step_of_few_long_and_short_items_is_even_within_ten_percent"),
    "B071": shown(
        "a row leads back to the file and the line",
        f"{FAULTS}::test_a_file_of_talks_becomes_what_a_model_trains_on_and_each_row_tells_its_lines",
    ),
    # Mixtures over time
    "B080": shown("a schedule goes on where it was", f"{ELASTIC}::test_a_chain_of_resumes_on_other_numbers_of_ranks"),
    "B083": shown("schedules over consumed tokens", "tests/order/test_drawer.py::test_tokens_follow_a_ramp_over_consumed_tokens"),
}
