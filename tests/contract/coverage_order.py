"""Rows of resume, other numbers of ranks, shuffling, sharding and state; see `test_contract_coverage.py`."""

from __future__ import annotations

from tests.contract.coverage_row import CONFIGURATION, Later, NotApplicable, Row, shown

BAD_INPUT = "tests/test_bad_input.py"
CHECK = "tests/cli/test_check.py"
CLOSE = "tests/contract/test_contract_close.py"
ELASTIC = "tests/contract/test_contract_elastic.py"
ERRORS = "tests/contract/test_contract_errors.py"
FAULTS = "tests/contract/test_contract_faults_order.py"
HUGGINGFACE = "tests/adapters/test_huggingface_in_loader.py"
DEALT = "tests/dropin/test_distributed_iterable.py"
INDEXED = "tests/order/test_indexed.py"
LOADER = "tests/dropin/test_distributed_loader.py"
MESH = "tests/order/test_mesh.py"
PEERS = "tests/contract/test_contract_mesh.py"
LANES = "tests/contract/test_contract_lanes.py"
ORDERED = "tests/order/test_ordered.py"
REPLAY = "tests/contract/test_contract_replay.py"
RESUME = "tests/contract/test_contract_resume.py"
RNG = "tests/contract/test_contract_rng.py"
ROLES = "tests/contract/test_contract_roles.py"

STAGES = Later(
    "a description of a loader's stages", "`aioloader check` prints placements and compares states, whose fingerprints hold these settings"
)

ROWS: dict[str, Row] = {
    # Resume
    "K02": shown(
        "after whole epochs nothing is lost or played again",
        f"{FAULTS}::test_a_state_after_three_shuffled_epochs_is_kept_and_the_fourth_follows",
        f"{RESUME}::test_a_state_after_whole_epochs",
    ),
    "K03": shown("a state is not loaded past a live iterator", f"{RESUME}::test_loading_under_a_live_iterator_is_refused"),
    "K04": shown(
        "a run resumes inside what was read at once",
        f"{FAULTS}::test_a_file_resumes_inside_what_its_reader_reads_at_once",
        f"{HUGGINGFACE}::test_a_mapped_stream_resumes_at_the_next_record",
    ),
    "K05": shown("a state saved without workers is loaded with and without", f"{RESUME}::test_a_state_saved_without_workers_is_loaded"),
    "K06": shown("a state from before the first batch is a state", f"{RESUME}::test_a_state_before_the_first_batch"),
    "K07": shown("positions count on over loads", f"{RESUME}::test_positions_count_on_over_several_loads"),
    "K08": shown("a later epoch resumes in its own order", f"{FAULTS}::test_a_shuffled_run_resumes_in_the_order_of_its_epoch"),
    "K09": shown("a state of other data is refused", f"{RESUME}::test_a_state_of_other_data_is_refused"),
    "K10": shown("options stay what they were", f"{RESUME}::test_a_resumed_loader_keeps_its_options"),
    # Other numbers of ranks
    "K11": shown(
        "what is left is the tail of the permutation, on any number of ranks",
        f"{FAULTS}::test_what_is_left_is_the_tail_of_the_permutation_on_any_number_of_ranks",
        f"{ELASTIC}::test_a_chain_of_resumes_on_other_numbers_of_ranks",
    ),
    "K12": shown("after the last step comes the next epoch", f"{FAULTS}::test_after_the_last_step_of_an_epoch_comes_the_first_of_the_next"),
    "K13": shown(
        "16 ranks go on where 10 stopped, and evaluation begins at 0",
        f"{FAULTS}::test_training_goes_on_with_16_ranks_instead_of_10_and_evaluation_begins_at_0",
        f"{ELASTIC}::test_a_merged_state_says_what_it_does_not_fit",
    ),
    # Shuffling and sharding
    "K14": shown(
        "a new epoch reaches workers that live on",
        f"{FAULTS}::test_the_epoch_reaches_workers_that_live_on",
        "tests/sources/test_conformance.py::test_the_epoch_reaches_the_upstream",
    ),
    "K15": shown(
        "one shard serves four ranks", f"{FAULTS}::test_four_ranks_share_one_shard", f"{DEALT}::test_one_shard_is_enough_for_all_ranks"
    ),
    "K16": shown(
        "several DataLoader workers around a loader are refused, those around a drop-in class get parts",
        "tests/contract/test_contract_hosts.py::test_a_dataset_for_a_dataloader",
        f"{DEALT}::test_a_dataloader_around_it_keeps_the_order",
        "tests/dropin/test_async_preprocess.py::test_a_dataloader_around_it_keeps_the_order",
    ),
    "K17": shown(
        "more consumers than records: all get their part, and equally many steps",
        f"{DEALT}::test_more_consumers_than_records_get_all_of_them",
        f"{LOADER}::test_real_ranks_take_equally_many_steps",
    ),
    "K18": shown(
        "an epoch is as long with any number of workers",
        f"{FAULTS}::test_the_length_of_an_epoch_does_not_depend_on_workers",
        f"{DEALT}::test_an_epoch_does_not_grow_with_the_workers",
    ),
    "K19": shown(
        "skip and take hold in the second pass",
        f"{FAULTS}::test_a_part_of_the_data_is_the_same_part_in_the_second_pass",
        f"{HUGGINGFACE}::test_a_part_of_a_stream_is_the_same_part_in_the_second_pass",
        f"{DEALT}::test_a_part_of_a_stream_is_the_same_part_in_the_second_pass",
    ),
    "K20": shown(
        "all ranks of a model replica get the same rows",
        f"{FAULTS}::test_all_ranks_of_a_model_replica_get_the_same_packed_rows",
        "tests/collate/test_context_parallel.py::test_one_data_coordinate_means_the_same_samples_and_borders_on_every_rank",
        f"{PEERS}::test_one_rank_reads_for_its_peers",
    ),
    "K21": shown(
        "a step has all its micro-batches",
        f"{FAULTS}::test_a_dropped_tail_leaves_whole_steps_of_four_micro_batches",
        f"{FAULTS}::test_a_kept_tail_makes_one_more_step_of_four_micro_batches",
        f"{LOADER}::test_a_step_of_several_micro_batches_is_whole",
    ),
    # Why it is built so
    "A020": shown(
        "data of known size are preprocessed once, and used again",
        "tests/cli/test_preprocess.py::test_settings_that_changed_are_refused_and_the_same_ones_used_again",
        "tests/preprocess/test_run.py::test_reading_needs_no_tokenizer",
    ),
    "A021": shown(
        "records are preprocessed several at a time (how much faster that is: tests/benchmarks)",
        "tests/contract/test_contract_bounded.py::test_no_worker_is_idle_while_records_wait_behind_a_slow_one",
        f"{ROLES}::test_a_trainer_waits_for_preprocessing_only_where_that_is_inline",
    ),
    "A022": shown("the upstream has one reader, whatever the workers", f"{ROLES}::test_one_reader_reads_and_only_workers_preprocess"),
    "A023": shown(
        "two runs and a resumed run have one order",
        "tests/contract/test_contract_order.py::test_random_delays_change_nothing",
        f"{RESUME}::test_resuming_at_every_batch_gives_the_tail",
        f"{RESUME}::test_resuming_in_other_processes_gives_the_tail",
    ),
    "A024": Row("base mode refuses what it would ignore", CONFIGURATION),
    "A025": shown("loading by index refuses streams, and says what takes them", f"{LOADER}::test_arguments_that_do_not_fit_are_named"),
    "A026": shown(
        "one sequential reader, parallel workers, results in order", f"{ROLES}::test_one_reader_reads_and_only_workers_preprocess"
    ),
    "A027": shown(
        "a window shuffle is repeatable, local and loses nothing",
        f"{FAULTS}::test_a_window_shuffle_is_repeatable_keeps_records_near_and_loses_none",
    ),
    # Ranks
    "A061": shown(
        "the loader deals every source to the ranks; the drop-in stage warns of one that is not dealt",
        f"{LANES}::test_the_union_of_ranks_is_the_input_and_disjoint",
        "tests/dropin/test_async_preprocess.py::test_an_undealt_dataset_in_a_job_of_several_ranks_is_warned_of",
    ),
    "A062": shown("Megatron's parallel state tells the rank", f"{MESH}::test_from_megatron_deals_by_its_data_parallel_group"),
    "A063": shown(
        "tensor peers get the share of their data coordinate, not of their global rank",
        f"{LANES}::test_tensor_and_pipeline_peers_deliver_the_same",
        f"{DEALT}::test_ranks_of_one_coordinate_get_the_same_records",
        f"{MESH}::test_from_a_device_mesh_of_torch",
    ),
    "A064": shown(
        "no two ranks get the same record",
        f"{FAULTS}::test_no_two_ranks_get_the_same_record",
        f"{DEALT}::test_the_union_over_the_ranks_is_the_data",
    ),
    # Errors and ends
    "A065": shown("after an error workers begin nothing more", f"{FAULTS}::test_after_an_error_workers_begin_nothing_more"),
    "A066": shown(
        "a failing upstream is heard of after the records before it",
        f"{ERRORS}::test_an_upstream_that_fails",
        f"{ERRORS}::test_an_upstream_that_fails_while_nobody_listens",
    ),
    "A067": shown("a failing record is heard of, in 100 of 100 runs", f"{ERRORS}::test_100_of_100_runs_stop_at_the_bad_record"),
    "A068": shown("a failure is never the end of data", f"{ERRORS}::test_an_error_is_raised_again"),
    "A069": shown(
        "what is no Exception is heard of too",
        f"{ERRORS}::test_odd_exceptions_come_through",
        f"{ERRORS}::test_an_upstream_that_fails_with_something_odd",
    ),
    "A070": shown(
        "a loop that is left leaves nothing behind",
        f"{CLOSE}::test_a_loop_that_is_left",
        f"{CLOSE}::test_a_loader_that_is_dropped_after_a_whole_pass",
    ),
    # The originals' example
    "A071": Row("a loader is made from the originals' data file", CONFIGURATION),
    "A072": Row("the type of the data set is checked", CONFIGURATION),
    "A073": Row("a missing tokenizer is named before anything starts", CONFIGURATION),
    "A074": Row("options of the tokenizer reach it", CONFIGURATION),
    "A075": Row("options of the processor reach it", CONFIGURATION),
    # Who gets what
    "B007": shown(
        "a run that was stopped anywhere repeats and skips nothing",
        f"{RESUME}::test_resuming_at_every_batch_gives_the_tail",
        f"{ELASTIC}::test_a_chain_of_resumes_on_other_numbers_of_ranks",
    ),
    "B009": shown("ranks have no record of a step in common", f"{FAULTS}::test_the_micro_batches_of_a_step_have_no_record_in_common"),
    "B012": shown("a restored loader gives the next batches", f"{RESUME}::test_resuming_at_every_batch_gives_the_tail"),
    "B014": shown("a state does not grow with what is shuffled", f"{FAULTS}::test_a_state_does_not_grow_with_what_is_shuffled"),
    "B015": shown(
        "lanes are micro-batches of a step over all ranks, and a multiple of the ranks",
        "tests/test_options.py::test_lanes_that_do_not_fit_are_refused",
        f"{FAULTS}::test_the_micro_batches_of_a_step_have_no_record_in_common",
    ),
    "B016": shown("all records of a step are distinct", f"{FAULTS}::test_the_micro_batches_of_a_step_have_no_record_in_common"),
    "B017": shown("map-style data have a sampler", "tests/order/test_sampling.py::test_a_dropped_tail_is_shorter_than_one_round"),
    "B018": shown(
        "records are dealt out one by one, or in blocks by a sampler",
        "tests/order/test_lanes.py::test_the_lanes_of_all_ranks_are_a_disjoint_cover",
        "tests/order/test_sampling.py::test_blocks_are_contiguous_slices",
    ),
    "B019": Row(
        "each rank opens its own shards",
        Later(
            "shards of a stream for each lane",
            "ranks read the same files and leave out others' records; of indexed sources they fetch their own",
        ),
    ),
    "B020": shown("consumed samples and tokens are counted", f"{FAULTS}::test_consumed_samples_and_tokens_are_those_of_the_batches"),
    "B021": shown(
        "a model replica shares its micro-batches",
        f"{FAULTS}::test_all_ranks_of_a_model_replica_get_the_same_packed_rows",
        f"{PEERS}::test_what_peers_get_is_what_each_would_read",
        "tests/collate/test_context_parallel.py::test_loaders_of_context_parallel_peers_deliver_parts_of_the_same_micro_batches",
    ),
    "B022": shown("a wrong mesh is found out at the start", f"{PEERS}::test_ranks_that_do_not_fit_all_say_so"),
    "B101": shown("a rank that shards by its global rank is found out", f"{PEERS}::test_ranks_that_do_not_fit_all_say_so"),
    # Order
    "B023": shown("ranks together cover the data", f"{FAULTS}::test_no_two_ranks_get_the_same_record"),
    "B024": shown(
        "epochs and seeds differ, and repeat",
        f"{FAULTS}::test_the_epoch_reaches_workers_that_live_on",
        f"{INDEXED}::test_epochs_seeds_and_purposes_differ_and_repeat",
    ),
    "B025": shown(
        "nothing is shuffled again on resume",
        f"{FAULTS}::test_what_is_left_is_the_tail_of_the_permutation_on_any_number_of_ranks",
        f"{FAULTS}::test_a_shuffled_run_resumes_in_the_order_of_its_epoch",
    ),
    "B026": shown("augmentation is the same with any number of workers", f"{RNG}::test_any_number_of_workers_draws_the_same"),
    "B035": shown(
        "finding a place reads nothing",
        "tests/sources/test_sequence.py::test_seeking_reads_nothing",
        f"{INDEXED}::test_any_positions_are_found_without_those_before_them",
    ),
    "B036": shown(
        "a stream with a state of its own is not read again",
        "tests/sources/test_iterable.py::test_resuming_with_state_reads_nothing_again",
        f"{ORDERED}::test_a_stream_resumed_in_a_window_reads_that_window_again_and_no_more",
    ),
    "B037": shown(
        "shards are shuffled, and records in windows of them",
        f"{INDEXED}::test_windows_mix_their_own_shards_only_and_are_of_like_size",
        f"{ORDERED}::test_each_epoch_is_shuffled_anew_and_the_same_each_time",
    ),
    "B108": shown(
        "how well an order mixes is measured",
        "tests/order/test_quality.py::test_windows_of_a_stream_move_records_by_a_third_of_a_window",
        "tests/order/test_quality.py::test_a_permutation_of_everything",
    ),
    # What a state holds
    "B027": shown("the seed", f"{BAD_INPUT}::test_a_state_of_another_configuration_names_every_difference"),
    "B028": shown("the epoch", f"{FAULTS}::test_a_shuffled_run_resumes_in_the_order_of_its_epoch", f"{RESUME}::test_epochs"),
    "B029": shown("the place in the order", f"{RESUME}::test_positions_count_on_over_several_loads"),
    "B030": shown(
        "no worker: random numbers belong to records",
        f"{RNG}::test_a_resumed_run_draws_what_the_first_would_have_drawn",
        f"{RESUME}::test_a_state_goes_from_any_host_to_any_other",
    ),
    "B031": shown(
        "the rank; that of another is never taken",
        f"{LANES}::test_a_state_of_another_rank_or_number_of_lanes_is_refused",
        f"{ELASTIC}::test_what_does_not_belong_together_is_not_merged",
    ),
    "B032": shown("the shard and the place in it", "tests/sources/test_json_lines.py::test_the_cursor_is_file_offset_and_line"),
    "B033": shown("what was consumed", f"{FAULTS}::test_consumed_samples_and_tokens_are_those_of_the_batches"),
    "B034": shown("all of that, or it is refused", f"{ELASTIC}::test_a_state_that_lost_any_part_is_refused"),
    "B043": shown(
        "the preprocess function, and another only on purpose",
        f"{BAD_INPUT}::test_a_state_of_another_configuration_names_every_difference",
        f"{RESUME}::test_a_state_after_a_caught_error_loses_nothing",
    ),
    "B073": shown("consumed samples", f"{FAULTS}::test_consumed_samples_and_tokens_are_those_of_the_batches"),
    "B074": shown("consumed tokens", f"{FAULTS}::test_consumed_samples_and_tokens_are_those_of_the_batches"),
    "B075": shown(
        "the epoch and where the pass ends", f"{RESUME}::test_a_state_of_the_middle_epoch_ends_where_the_interrupted_pass_would_have_ended"
    ),
    "B076": shown("the place in the order, also of a shuffle", f"{FAULTS}::test_a_shuffled_run_resumes_in_the_order_of_its_epoch"),
    "B077": shown(
        "the place of what was delivered, not of the reader",
        f"{RESUME}::test_a_stream_is_resumed_at_every_batch",
        f"{RESUME}::test_the_state_after_an_older_batch_that_is_still_held",
    ),
    "B078": shown("the random seed", f"{BAD_INPUT}::test_a_state_of_another_configuration_names_every_difference"),
    "B081": shown(
        "the version of the data",
        f"{FAULTS}::test_a_file_that_changed_is_named_on_resume",
        f"{RESUME}::test_a_state_of_other_data_is_refused",
    ),
    "B082": shown("the place inside a step", f"{ELASTIC}::test_a_step_that_was_begun_is_finished_by_other_ranks"),
    "B102": shown("and nothing can be missing", f"{ELASTIC}::test_a_state_that_lost_any_part_is_refused"),
    # Checkpoints and traces
    "B072": shown(
        "the loader's state is part of the model's checkpoint, also for another number of ranks",
        "tests/training/test_run.py::test_a_run_that_was_interrupted_continues_bit_for_bit",
        "tests/training/test_proof_of_value.py::test_two_ranks_were_killed_and_one_goes_on",
    ),
    "B107": shown("any micro-batch is made again, with the records in it", f"{REPLAY}::test_any_micro_batch_is_made_again"),
    "B109": shown("which rank gets which lanes is printed", f"{CHECK}::test_the_table_of_every_rank"),
    "B110": shown(
        "peers are compared at the start and while they run",
        f"{PEERS}::test_ranks_that_fit_are_let_through",
        f"{PEERS}::test_ranks_that_do_not_fit_all_say_so",
    ),
    "B111": Row("where tokens are made is printed", STAGES),
    "B112": Row("where rows are packed is printed", STAGES),
    "B113": Row("what fills a batch is printed", STAGES),
    "B114": Row("what buckets change is printed", STAGES),
    "B116": Row(
        "a checkpoint without the loader's state is noticed", NotApplicable("Trainer always saves it; in another loop nobody else can know")
    ),
    "B119": shown("a run resumes from any state", f"{RESUME}::test_resuming_at_every_batch_gives_the_tail"),
}
