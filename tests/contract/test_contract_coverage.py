"""Which test shows what: faults reported against comparable loaders (K) and what an asynchronous preprocessing stage owes (A).

Every row has a test, or a reason why it has none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import NamedTuple

from tests.contract.cases import ROOT


class NotApplicable(NamedTuple):
    """The row does not fit this loader."""

    reason: str


class Later(NamedTuple):
    """The row belongs to a part that does not exist yet."""

    part: str
    reason: str


ROWS: dict[str, str] = {
    # Order
    "K01": "several workers keep the order of the source",
    # A worker's death
    "K36": "a worker killed from outside leaves nobody waiting",
    "K37": "workers neither end with an epoch nor pile up",
    # Hanging and closing
    "K38": "one worker and every buffer at its smallest get to the end",
    "K39": "a wait cancelled during the start does not hold up closing, under either event loop",
    "K40": "a function that cannot be pickled neither hangs nor holds up closing",
    "K41": "a source that blocks for ever does not hold up the exit",
    "K42": "an upstream that fails while buffers are full is heard of",
    "K43": "Ctrl-C ends everything with one traceback",
    "K44": "a plain loop works where an event loop is running",
    # Memory
    "K45": "jobs that start together share no name",
    "K46": "a thousand kept batches hold no descriptors",
    "K47": "a large list is not copied into each worker page by page",
    "K48": "little shared memory ends in no bus error",
    # Exceptions
    "K49": "odd exceptions arrive with type, text, traceback and record",
    "K50": "an error never becomes a normal end",
    "K51": "a used-up failure budget blames the stage that failed",
    # Pickling and starting
    "K52": "lambdas work; a lock in an argument is named before the first batch",
    "K53": "a trainer that uses a GPU disturbs no worker",
    "K54": "a worker is one thread on the trainer's CPUs",
    "K55": "a tokenizer that ran in parallel before does not lock up in workers",
    # Random numbers
    "K56": "a resumed run draws what the first would have drawn",
    "K57": "no two workers, records or epochs draw the same",
    # Buffer and workers
    "A011": "the buffer counts single records",
    "A012": "a call gets one record",
    "A013": "a larger buffer holds more, none more than it may, also while the first record is slow",
    "A014": "neither buffer nor workers given: 8 and as many CPUs",
    "A015": "only workers given: the buffer is as large",
    "A016": "only the buffer given: workers up to the CPUs",
    "A017": "both given: kept, with a warning where the buffer is smaller; nothing below 1",
    "A018": "the batch size of preprocessing does not touch calls of one record",
    "A019": "the buffer changes no call and no result",
    # Sharding comes first
    "A029": "a rank preprocesses its own records only",
    "A030": "every way to describe the ranks leads to the same stages",
    "A031": "preprocessing knows of no rank",
    "A032": "sharding after preprocessing is refused",
    "A033": "filtering and expansion move no border between ranks",
    # One reader, numbers, workers
    "A034": "one reader reads the upstream",
    "A035": "records are numbered 0, 1, 2 without gaps",
    "A036": "workers never touch the upstream",
    "A037": "results come back in the order of the numbers",
    "A038": "settings of the originals' configuration files are understood",
    "A039": "two switches select the asynchronous stage",
    "A040": "the stage's settings are numbers once it is made",
    "A041": "statistics show idle workers and buffered bytes",
    "A042": "a slow trainer gains little from a larger buffer",
    # Columns
    "A043": "advice on workers follows from the times of preprocessing and training",
    "A044": "slow preprocessing: more workers first, then a buffer for them",
    "A045": "comparable times: a buffer of one to two records per worker",
    "A046": "slow training: a buffer near the number of workers",
    "A047": "a record becomes columns of one value, a result of n values n samples",
    "A048": "nothing and empty columns filter a record",
    "A049": "columns of unequal length are an error with their names and the record",
    # Producer, workers, ordered output
    "A050": "the reader never calls the preprocess function",
    "A051": "three kinds of messages come from workers",
    "A052": "each kind moves the collecting side on; others are an internal error",
    "A053": "ranks are disjoint, complete and reproducible",
    "A054": "records are dealt out by their index modulo the ranks",
    "A055": "a slow worker on one rank changes no rank",
    "A056": "numbers count a rank's own records and lead back to the index",
    "A057": "later results wait for the first",
    "A058": "nothing comes before its turn, whatever the schedule",
    "A059": "the samples of one record stay together",
    "A060": "two ranks and six records, the first one slow",
}

_DROP_IN = Later("AsyncPreprocessIterableDataset", "the drop-in class keeps the original's rules for what is left out; Loader has its own")
_CONFIGURATION = Later("configuration of the originals", "an adapter is to read their files; Loader takes arguments only")
_MESSAGES = NotApplicable(
    "workers answer each chunk with one block that holds its results and its failure; the end of data is the end of reading, not a message"
)

SHOWN_BY: dict[str, tuple[str, ...] | NotApplicable | Later] = {
    "K01": ("tests/contract/test_contract_order.py::test_four_workers_with_a_regular_delay_keep_the_order",),
    "K36": ("tests/contract/test_contract_errors.py::test_a_worker_that_is_killed_from_outside",),
    "K37": ("tests/contract/test_contract_close.py::test_20_passes_keep_their_workers",),
    "K38": ("tests/contract/test_contract_bounded.py::test_everything_at_its_smallest",),
    "K39": (
        "tests/contract/test_contract_close.py::test_cancelling_while_everything_starts",
        "tests/contract/test_contract_close.py::test_closing_at_any_moment_of_the_start",
    ),
    "K40": (
        "tests/contract/test_contract_processes.py::test_a_lock_in_an_argument_is_named_before_anything_starts_and_does_without_workers",
        "tests/test_bad_input.py::test_a_wrong_argument_of_the_loader",
    ),
    "K41": ("tests/contract/test_contract_close.py::test_a_source_that_blocks_for_ever_does_not_hold_up_the_exit",),
    "K42": ("tests/contract/test_contract_errors.py::test_an_upstream_that_fails_while_nobody_listens",),
    "K43": (
        "tests/contract/test_contract_close.py::test_ctrl_c",
        "tests/contract/test_contract_close.py::test_ctrl_c_at_any_moment_of_the_start",
    ),
    "K44": ("tests/contract/test_contract_hosts.py::test_a_plain_for_inside_a_running_loop",),
    "K45": ("tests/contract/test_contract_close.py::test_jobs_that_start_together_do_not_meet",),
    "K46": (
        "tests/contract/test_contract_close.py::test_1000_kept_batches_need_no_descriptors",
        "tests/contract/test_contract_close.py::test_many_blocks_that_wait_for_a_slow_trainer_need_no_descriptors",
    ),
    "K47": ("tests/contract/test_contract_processes.py::test_a_large_list_is_not_copied_page_by_page",),
    "K48": ("tests/contract/test_contract_processes.py::test_shared_memory_lies_in_no_file_system_that_could_be_full",),
    "K49": (
        "tests/contract/test_contract_errors.py::test_odd_exceptions_come_through",
        "tests/contract/test_contract_errors.py::test_an_odd_exception_comes_through_from_two_processes_away",
    ),
    "K50": ("tests/contract/test_contract_errors.py::test_an_error_is_raised_again",),
    "K51": ("tests/contract/test_contract_recovery.py::test_a_budget_that_is_used_up_blames_the_stage_that_failed_and_no_other",),
    "K52": (
        "tests/contract/test_contract_processes.py::test_a_lock_in_an_argument_is_named_before_anything_starts_and_does_without_workers",
        "tests/contract/test_contract_preprocess.py::test_closures_objects_methods_and_partials",
    ),
    "K53": (
        "tests/contract/test_contract_processes.py::test_workers_are_no_copies_of_the_trainer",
        "tests/contract/test_contract_processes.py::test_workers_beside_a_trainer_that_uses_the_gpu",
    ),
    "K54": ("tests/contract/test_contract_processes.py::test_a_worker_is_one_thread_on_the_cpus_of_the_trainer",),
    "K55": ("tests/contract/test_contract_processes.py::test_a_tokenizer_that_was_used_in_parallel_before",),
    "K56": ("tests/contract/test_contract_rng.py::test_a_resumed_run_draws_what_the_first_would_have_drawn",),
    "K57": (
        "tests/contract/test_contract_rng.py::test_workers_do_not_inherit_one_numpy_state",
        "tests/contract/test_contract_rng.py::test_records_epochs_and_seeds_differ",
    ),
    "A011": ("tests/contract/test_contract_bounded.py::test_reading_stops_when_the_trainer_does",),
    "A012": ("tests/contract/test_contract_roles.py::test_the_buffer_changes_neither_what_a_call_gets_nor_what_it_makes",),
    "A013": (
        "tests/contract/test_contract_roles.py::test_a_larger_buffer_holds_more_and_none_more_than_it_may",
        "tests/contract/test_contract_bounded.py::test_a_slow_first_record_does_not_let_others_pile_up",
    ),
    "A014": _DROP_IN,
    "A015": _DROP_IN,
    "A016": _DROP_IN,
    "A017": _DROP_IN,
    "A018": Later("preprocess_batch_size", "a size above 1 is refused until then, so that every call gets one record"),
    "A019": ("tests/contract/test_contract_roles.py::test_the_buffer_changes_neither_what_a_call_gets_nor_what_it_makes",),
    "A029": ("tests/contract/test_contract_lanes.py::test_preprocessing_runs_once_per_record_in_the_job",),
    "A030": Later("Mesh from a DeviceMesh and from Megatron", "there is one engine; the two ways to describe the ranks are to come"),
    "A031": (
        "tests/contract/test_contract_roles.py::test_what_a_record_becomes_does_not_depend_on_its_rank",
        "tests/contract/test_contract_roles.py::test_preprocessing_is_told_nothing_of_ranks",
    ),
    "A032": NotApplicable("stages are arguments of one Loader and no chain that users put in order: the wrong order cannot be written"),
    "A033": ("tests/contract/test_contract_roles.py::test_what_a_rank_makes_comes_from_its_own_records",),
    "A034": ("tests/contract/test_contract_roles.py::test_one_reader_reads_and_only_workers_preprocess",),
    "A035": (
        "tests/contract/test_contract_preprocess.py::test_none_filters_and_a_list_is_many",
        "tests/order/test_lanes.py::test_seqs_of_a_lane_are_dense_and_in_order",
        "tests/engine/test_producer.py::test_every_record_is_given_to_one_rank_under_its_own_number",
    ),
    "A036": ("tests/contract/test_contract_hosts.py::test_a_generator_is_read_by_a_host_in_this_process",),
    "A037": (
        "tests/contract/test_contract_roles.py::test_nothing_overtakes_the_first_record",
        "tests/contract/test_contract_order.py::test_random_delays_change_nothing",
    ),
    "A038": _CONFIGURATION,
    "A039": _CONFIGURATION,
    "A040": _DROP_IN,
    "A041": ("tests/contract/test_contract_roles.py::test_idle_workers_and_buffered_bytes_are_seen",),
    "A042": NotApplicable("advice that only a comparison of speeds can bear out, and tests are never timed"),
    "A043": (
        "tests/telemetry/test_advice.py::test_preprocessing_that_is_slower_than_training_gets_workers_first_and_a_buffer_for_them",
        "tests/contract/test_contract_roles.py::test_the_times_that_advice_needs_are_measured",
    ),
    "A044": ("tests/telemetry/test_advice.py::test_preprocessing_that_is_slower_than_training_gets_workers_first_and_a_buffer_for_them",),
    "A045": ("tests/telemetry/test_advice.py::test_where_both_take_as_long_the_buffer_is_between_one_and_two_records_per_worker",),
    "A046": ("tests/telemetry/test_advice.py::test_where_training_is_slower_the_buffer_stays_near_the_workers",),
    "A047": (
        "tests/contract/test_contract_preprocess.py::test_columns",
        "tests/contract/test_contract_roles.py::test_the_buffer_changes_neither_what_a_call_gets_nor_what_it_makes",
    ),
    "A048": (
        "tests/contract/test_contract_preprocess.py::test_columns",
        "tests/pools/test_runner.py::test_no_columns_filter_the_record",
    ),
    "A049": ("tests/contract/test_contract_preprocess.py::test_wrong_columns_are_named",),
    "A050": ("tests/contract/test_contract_roles.py::test_one_reader_reads_and_only_workers_preprocess",),
    "A051": _MESSAGES,
    "A052": _MESSAGES,
    "A053": (
        "tests/contract/test_contract_lanes.py::test_the_union_of_ranks_is_the_input_and_disjoint",
        "tests/contract/test_contract_lanes.py::test_each_step_and_lane_is_the_same_for_every_number_of_ranks",
    ),
    "A054": (
        "tests/contract/test_contract_roles.py::test_ranks_keep_their_sequences_whichever_worker_is_slow",
        "tests/order/test_lanes.py::test_the_lanes_of_all_ranks_are_a_disjoint_cover",
    ),
    "A055": ("tests/contract/test_contract_roles.py::test_ranks_keep_their_sequences_whichever_worker_is_slow",),
    "A056": ("tests/contract/test_contract_roles.py::test_ranks_keep_their_sequences_whichever_worker_is_slow",),
    "A057": ("tests/contract/test_contract_roles.py::test_nothing_overtakes_the_first_record",),
    "A058": (
        "tests/engine/test_heap.py::test_reorder_is_a_sort",
        "tests/contract/test_contract_roles.py::test_nothing_overtakes_the_first_record",
    ),
    "A059": ("tests/contract/test_contract_preprocess.py::test_none_filters_and_a_list_is_many",),
    "A060": ("tests/contract/test_contract_roles.py::test_ranks_keep_their_sequences_whichever_worker_is_slow",),
}


def defined_in(path: str) -> set[str]:
    """Return the names of the test functions that a file defines, or nothing if there is no such file."""
    file = ROOT / path
    if not file.is_file():
        return set()
    tree = ast.parse(file.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")}


def missing(tests: Iterable[str]) -> set[str]:
    """Return which node ids (`path::function`) name no test."""
    return {test for test in tests if test.partition("::")[2] not in defined_in(test.partition("::")[0])}


def test_every_row_is_shown_or_has_a_reason() -> None:
    assert SHOWN_BY.keys() == ROWS.keys()
    assert not [row for row, shown in SHOWN_BY.items() if not (shown and all(shown))]


def test_every_test_named_here_exists() -> None:
    assert missing(test for shown in SHOWN_BY.values() if not isinstance(shown, NotApplicable | Later) for test in shown) == set()


def test_a_test_that_does_not_exist_is_found() -> None:
    wrong = {"tests/contract/test_contract_coverage.py::test_of_nothing", "tests/test_of_nothing.py::test_every_row"}
    assert missing([*wrong, "tests/contract/test_contract_coverage.py::test_every_test_named_here_exists"]) == wrong
