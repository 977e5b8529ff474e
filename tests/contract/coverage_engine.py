"""Rows of the engine, the buffer, workers and errors; see `test_contract_coverage.py`."""

from __future__ import annotations

from tests.contract.coverage_row import CONFIGURATION, Row, shown

ADVICE = "tests/telemetry/test_advice.py"
BOUNDED = "tests/contract/test_contract_bounded.py"
CHAIN = "tests/dropin/test_chain.py"
CLOSE = "tests/contract/test_contract_close.py"
DROP_IN = "tests/dropin/test_async_preprocess.py"
ERRORS = "tests/contract/test_contract_errors.py"
HOST = "tests/engine/test_host.py"
HOSTS = "tests/contract/test_contract_hosts.py"
LANES = "tests/contract/test_contract_lanes.py"
MESH = "tests/order/test_mesh.py"
ORDER = "tests/contract/test_contract_order.py"
ORDER_LANES = "tests/order/test_lanes.py"
PREPROCESS = "tests/contract/test_contract_preprocess.py"
PROCESSES = "tests/contract/test_contract_processes.py"
RNG = "tests/contract/test_contract_rng.py"
ROLES = "tests/contract/test_contract_roles.py"


ROWS: dict[str, Row] = {
    # Order
    "K01": shown("several workers keep the order of the source", f"{ORDER}::test_four_workers_with_a_regular_delay_keep_the_order"),
    # A worker's death
    "K36": shown("a worker killed from outside leaves nobody waiting", f"{ERRORS}::test_a_worker_that_is_killed_from_outside"),
    "K37": shown("workers neither end with an epoch nor pile up", f"{CLOSE}::test_20_passes_keep_their_workers"),
    # Hanging and closing
    "K38": shown("one worker and every buffer at its smallest get to the end", f"{BOUNDED}::test_everything_at_its_smallest"),
    "K39": shown(
        "a wait cancelled during the start does not hold up closing, under either event loop",
        f"{CLOSE}::test_cancelling_while_everything_starts",
        f"{CLOSE}::test_closing_at_any_moment_of_the_start",
    ),
    "K40": shown(
        "a function that cannot be pickled neither hangs nor holds up closing",
        f"{PROCESSES}::test_a_lock_in_an_argument_is_named_before_anything_starts_and_does_without_workers",
        "tests/test_bad_input.py::test_a_wrong_argument_of_the_loader",
    ),
    "K41": shown(
        "a source that blocks for ever does not hold up the exit", f"{CLOSE}::test_a_source_that_blocks_for_ever_does_not_hold_up_the_exit"
    ),
    "K42": shown(
        "an upstream that fails while buffers are full is heard of", f"{ERRORS}::test_an_upstream_that_fails_while_nobody_listens"
    ),
    "K43": shown("Ctrl-C ends everything with one traceback", f"{CLOSE}::test_ctrl_c", f"{CLOSE}::test_ctrl_c_at_any_moment_of_the_start"),
    "K44": shown("a plain loop works where an event loop is running", f"{HOSTS}::test_a_plain_for_inside_a_running_loop"),
    # Memory
    "K45": shown("jobs that start together share no name", f"{CLOSE}::test_jobs_that_start_together_do_not_meet"),
    "K46": shown(
        "a thousand kept batches hold no descriptors",
        f"{CLOSE}::test_1000_kept_batches_need_no_descriptors",
        f"{CLOSE}::test_many_blocks_that_wait_for_a_slow_trainer_need_no_descriptors",
    ),
    "K47": shown("a large list is not copied into each worker page by page", f"{PROCESSES}::test_a_large_list_is_not_copied_page_by_page"),
    "K48": shown(
        "little shared memory ends in no bus error",
        f"{PROCESSES}::test_batches_that_are_larger_than_all_of_dev_shm",
        f"{PROCESSES}::test_shared_memory_lies_in_no_file_system_that_could_be_full",
    ),
    # Exceptions
    "K49": shown(
        "odd exceptions arrive with type, text, traceback and record",
        f"{ERRORS}::test_odd_exceptions_come_through",
        f"{ERRORS}::test_an_odd_exception_comes_through_from_two_processes_away",
    ),
    "K50": shown("an error never becomes a normal end", f"{ERRORS}::test_an_error_is_raised_again"),
    "K51": shown(
        "a used-up failure budget blames the stage that failed",
        "tests/contract/test_contract_recovery.py::test_a_budget_that_is_used_up_blames_the_stage_that_failed_and_no_other",
    ),
    # Pickling and starting
    "K52": shown(
        "lambdas work; a lock in an argument is named before the first batch",
        f"{PROCESSES}::test_a_lock_in_an_argument_is_named_before_anything_starts_and_does_without_workers",
        f"{PREPROCESS}::test_closures_objects_methods_and_partials",
    ),
    "K53": shown(
        "a trainer that uses a GPU disturbs no worker",
        f"{PROCESSES}::test_workers_are_no_copies_of_the_trainer",
        f"{PROCESSES}::test_workers_beside_a_trainer_that_uses_the_gpu",
    ),
    "K54": shown("a worker is one thread on the trainer's CPUs", f"{PROCESSES}::test_a_worker_is_one_thread_on_the_cpus_of_the_trainer"),
    "K55": shown(
        "a tokenizer that ran in parallel before does not lock up in workers",
        f"{PROCESSES}::test_a_tokenizer_that_was_used_in_parallel_before",
    ),
    # Random numbers
    "K56": shown("a resumed run draws what the first would have drawn", f"{RNG}::test_a_resumed_run_draws_what_the_first_would_have_drawn"),
    "K57": shown(
        "no two workers, records or epochs draw the same",
        f"{RNG}::test_workers_do_not_inherit_one_numpy_state",
        f"{RNG}::test_records_epochs_and_seeds_differ",
    ),
    # What it is for
    "A001": shown(
        "records are preprocessed several at a time, and come in their order",
        f"{DROP_IN}::test_samples_come_in_the_order_of_the_records",
        f"{BOUNDED}::test_no_worker_is_idle_while_records_wait_behind_a_slow_one",
    ),
    "A002": shown("Megatron and DeviceMesh say the same of a rank", f"{MESH}::test_from_megatron_is_from_device_mesh"),
    "A003": shown(
        "streams of Hugging Face are read in their order",
        "tests/adapters/test_huggingface.py::test_streams_of_files_keep_the_contract_at_every_record",
        "tests/dropin/test_distributed_iterable.py::test_a_rank_gets_every_nth_record",
    ),
    "A004": shown(
        "values of all kinds come through as they are",
        f"{DROP_IN}::test_values_of_all_kinds_come_as_they_are",
        "tests/contract/test_contract_memory.py::test_a_zoo_of_samples_comes_back_as_it_was",
    ),
    "A005": shown(
        "a trainer does not wait for preprocessing", f"{ROLES}::test_a_trainer_waits_for_preprocessing_only_where_that_is_inline"
    ),
    "A006": shown(
        "each rank has one order, whatever the delays",
        f"{DROP_IN}::test_random_delays_change_nothing",
        f"{ORDER}::test_random_delays_change_nothing",
    ),
    "A007": shown("a function for a batched map is used as it is", f"{CHAIN}::test_one_record_at_a_time_makes_what_a_batched_map_makes"),
    "A008": Row("a switch turns it on, for streams only", CONFIGURATION),
    "A009": shown(
        "records are dealt to ranks before they are preprocessed",
        f"{DROP_IN}::test_each_record_of_a_rank_is_preprocessed_once",
        f"{DROP_IN}::test_the_reversed_order_is_refused_unless_asked_for",
    ),
    "A010": shown(
        "without it, a batched map makes the same", f"{CHAIN}::test_a_batched_map_in_its_place_makes_the_same_and_its_batch_size_is_its_own"
    ),
    # Buffer and workers
    "A011": shown("the buffer counts single records", f"{BOUNDED}::test_reading_stops_when_the_trainer_does"),
    "A012": shown("a call gets one record", f"{ROLES}::test_the_buffer_changes_neither_what_a_call_gets_nor_what_it_makes"),
    "A013": shown(
        "a larger buffer holds more, none more than it may, also while the first record is slow",
        f"{ROLES}::test_a_larger_buffer_holds_more_and_none_more_than_it_may",
        f"{BOUNDED}::test_a_slow_first_record_does_not_let_others_pile_up",
    ),
    "A014": shown(
        "neither buffer nor workers given: 8 and as many CPUs", f"{DROP_IN}::test_what_is_left_out_follows_the_rules_of_the_original"
    ),
    "A015": shown("only workers given: the buffer is as large", f"{DROP_IN}::test_what_is_left_out_follows_the_rules_of_the_original"),
    "A016": shown("only the buffer given: workers up to the CPUs", f"{DROP_IN}::test_what_is_left_out_follows_the_rules_of_the_original"),
    "A017": shown(
        "both given: kept, with a warning where the buffer is smaller; nothing below 1",
        f"{DROP_IN}::test_fewer_records_than_workers_are_kept_with_one_warning",
        f"{DROP_IN}::test_what_is_no_number_is_refused",
    ),
    "A018": shown(
        "the batch size of a map does not touch calls of one record",
        f"{CHAIN}::test_a_batched_map_in_its_place_makes_the_same_and_its_batch_size_is_its_own",
    ),
    "A019": shown(
        "the buffer changes no call and no result", f"{ROLES}::test_the_buffer_changes_neither_what_a_call_gets_nor_what_it_makes"
    ),
    # Sharding comes first
    "A029": shown("a rank preprocesses its own records only", f"{LANES}::test_preprocessing_runs_once_per_record_in_the_job"),
    "A030": shown(
        "every way to describe the ranks leads to the same stages",
        f"{MESH}::test_from_megatron_is_from_device_mesh",
        f"{MESH}::test_from_device_mesh_is_from_layout",
    ),
    "A031": shown(
        "preprocessing knows of no rank",
        f"{ROLES}::test_what_a_record_becomes_does_not_depend_on_its_rank",
        f"{ROLES}::test_preprocessing_is_told_nothing_of_ranks",
    ),
    "A032": shown("sharding after preprocessing is refused", f"{DROP_IN}::test_the_reversed_order_is_refused_unless_asked_for"),
    "A033": shown("filtering and expansion move no border between ranks", f"{ROLES}::test_what_a_rank_makes_comes_from_its_own_records"),
    # One reader, numbers, workers
    "A034": shown("one reader reads the upstream", f"{ROLES}::test_one_reader_reads_and_only_workers_preprocess"),
    "A035": shown(
        "records are numbered 0, 1, 2 without gaps",
        f"{PREPROCESS}::test_none_filters_and_a_list_is_many",
        f"{ORDER_LANES}::test_seqs_of_a_lane_are_dense_and_in_order",
        "tests/engine/test_producer.py::test_every_record_is_given_to_one_rank_under_its_own_number",
    ),
    "A036": shown("workers never touch the upstream", f"{HOSTS}::test_a_generator_is_read_by_a_host_in_this_process"),
    "A037": shown(
        "results come back in the order of the numbers",
        f"{ROLES}::test_nothing_overtakes_the_first_record",
        f"{ORDER}::test_random_delays_change_nothing",
    ),
    "A038": Row("settings of the originals' configuration files are understood", CONFIGURATION),
    "A039": Row("two switches select the asynchronous stage", CONFIGURATION),
    "A040": shown("the stage's settings are numbers once it is made", f"{DROP_IN}::test_the_dataset_knows_its_numbers"),
    "A041": shown("statistics show idle workers and buffered bytes", f"{ROLES}::test_idle_workers_and_buffered_bytes_are_seen"),
    "A042": shown("a slow trainer gains little from a larger buffer", f"{ROLES}::test_a_larger_buffer_gives_a_slow_trainer_nothing"),
    # Columns
    "A043": shown(
        "advice on workers follows from the times of preprocessing and training",
        f"{ADVICE}::test_preprocessing_that_is_slower_than_training_gets_workers_first_and_a_buffer_for_them",
        f"{ROLES}::test_the_times_that_advice_needs_are_measured",
    ),
    "A044": shown(
        "slow preprocessing: more workers first, then a buffer for them",
        f"{ADVICE}::test_preprocessing_that_is_slower_than_training_gets_workers_first_and_a_buffer_for_them",
    ),
    "A045": shown(
        "comparable times: a buffer of one to two records per worker",
        f"{ADVICE}::test_where_both_take_as_long_the_buffer_is_between_one_and_two_records_per_worker",
    ),
    "A046": shown(
        "slow training: a buffer near the number of workers", f"{ADVICE}::test_where_training_is_slower_the_buffer_stays_near_the_workers"
    ),
    "A047": shown(
        "a record becomes columns of one value, a result of n values n samples",
        f"{PREPROCESS}::test_columns",
        f"{ROLES}::test_the_buffer_changes_neither_what_a_call_gets_nor_what_it_makes",
    ),
    "A048": shown(
        "nothing and empty columns filter a record",
        f"{PREPROCESS}::test_columns",
        "tests/pools/test_runner.py::test_no_columns_filter_the_record",
    ),
    "A049": shown("columns of unequal length are an error with their names and the record", f"{PREPROCESS}::test_wrong_columns_are_named"),
    # Producer, workers, ordered output
    "A050": shown("the reader never calls the preprocess function", f"{ROLES}::test_one_reader_reads_and_only_workers_preprocess"),
    "A051": shown(
        "results, the end and an error are all that comes (a worker's failure is part of its results)",
        f"{HOST}::test_each_message_of_the_engine_moves_the_trainer_on",
        "tests/pools/test_pool_conformance.py::test_a_failure_keeps_its_place",
    ),
    "A052": shown(
        "each moves the collecting side on; anything else is an internal error",
        f"{HOST}::test_each_message_of_the_engine_moves_the_trainer_on",
        "tests/engine/test_pipeline.py::test_a_source_that_fails_ends_the_pass_after_everything_before",
    ),
    "A053": shown(
        "ranks are disjoint, complete and reproducible",
        f"{LANES}::test_the_union_of_ranks_is_the_input_and_disjoint",
        f"{LANES}::test_each_step_and_lane_is_the_same_for_every_number_of_ranks",
    ),
    "A054": shown(
        "records are dealt out by their index modulo the ranks",
        f"{ROLES}::test_ranks_keep_their_sequences_whichever_worker_is_slow",
        f"{ORDER_LANES}::test_the_lanes_of_all_ranks_are_a_disjoint_cover",
    ),
    "A055": shown("a slow worker on one rank changes no rank", f"{ROLES}::test_ranks_keep_their_sequences_whichever_worker_is_slow"),
    "A056": shown(
        "numbers count a rank's own records and lead back to the index",
        f"{ROLES}::test_ranks_keep_their_sequences_whichever_worker_is_slow",
    ),
    "A057": shown("later results wait for the first", f"{ROLES}::test_nothing_overtakes_the_first_record"),
    "A058": shown(
        "nothing comes before its turn, whatever the schedule",
        "tests/engine/test_heap.py::test_reorder_is_a_sort",
        "tests/engine/test_heap.py::test_nothing_comes_before_its_turn_in_10000_random_schedules",
        f"{ROLES}::test_nothing_overtakes_the_first_record",
    ),
    "A059": shown("the samples of one record stay together", f"{PREPROCESS}::test_none_filters_and_a_list_is_many"),
    "A060": shown("two ranks and six records, the first one slow", f"{ROLES}::test_ranks_keep_their_sequences_whichever_worker_is_slow"),
}
