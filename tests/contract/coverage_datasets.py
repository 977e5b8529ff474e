"""Rows of offline preprocessing, token files, samplers and map-style loading; see `test_contract_coverage.py`."""

from __future__ import annotations

from tests.contract.coverage_row import Later, Row, shown

COLLATOR = "tests/collate/test_pretrain.py"
COMMAND = "tests/cli/test_preprocess.py"
ELASTIC = "tests/contract/test_contract_elastic.py"
LOADER = "tests/dropin/test_distributed_loader.py"
MESH = "tests/contract/test_contract_mesh.py"
PACKED = "tests/dropin/test_packed_dataset.py"
PINNING = "tests/contract/test_contract_pinning.py"
PREPROCESS = "tests/preprocess/test_run.py"
READING = "tests/tokens/test_reading.py"
SAMPLER = "tests/dropin/test_sampler.py"
SAMPLING = "tests/order/test_sampling.py"
WINDOWS = "tests/dropin/test_mmap_tokens.py"

ROWS: dict[str, Row] = {
    # Offline
    "C004": shown(
        "lines, rows, text and data sets of the hub give the same tokens",
        f"{PREPROCESS}::test_lines_rows_and_files_of_text_give_the_same_tokens",
        f"{PREPROCESS}::test_a_data_set_of_the_hub_gives_the_same_tokens",
    ),
    "C005": shown("the number of processes changes no byte", f"{PREPROCESS}::test_the_number_of_workers_does_not_matter"),
    "C006": shown("as many ends as documents", f"{PREPROCESS}::test_the_stream_is_every_document_and_its_end"),
    "C007": shown("rows are the stream cut, and the tail is told", f"{PREPROCESS}::test_rows_are_the_stream_cut_and_the_tail_is_counted"),
    "C008": shown(
        "torch maps the file, and its facts lie beside it",
        f"{PREPROCESS}::test_torch_maps_what_was_saved_once",
        "tests/tokens/test_torch_zip.py::test_torch_loads_every_type_mapped_and_as_a_whole",
    ),
    "C009": shown("training needs no tokenizer", f"{PREPROCESS}::test_reading_needs_no_tokenizer"),
    "C010": shown(
        "memory does not grow with the text (200 MB: tests/benchmarks/preprocess_table.py)",
        "tests/preprocess/test_memory.py::test_more_text_takes_no_more_memory",
    ),
    "D005": shown("an int32 file for each input", f"{PREPROCESS}::test_each_input_has_a_file_of_its_own"),
    "D006": shown("documents end, and what was added is told", f"{PREPROCESS}::test_the_stream_is_every_document_and_its_end"),
    "K75": shown(
        "one process writes to a directory, the others wait for it",
        f"{COMMAND}::test_one_process_writes_to_a_directory_and_the_others_use_it",
    ),
    "K76": shown(
        "what was made with other settings is not used, what was made with these is",
        f"{COMMAND}::test_settings_that_changed_are_refused_and_the_same_ones_used_again",
        f"{COMMAND}::test_damaged_files_are_not_used_again",
    ),
    "K77": shown("documents that all fail are no success", f"{COMMAND}::test_all_documents_that_fail_are_no_success"),
    "K78": shown(
        "bad documents are named, or the first ends the run",
        f"{COMMAND}::test_bad_documents_are_left_out_and_named",
        f"{COMMAND}::test_the_first_bad_document_ends_a_strict_run",
    ),
    # Token files
    "C011": shown(
        "opening a large file takes no memory, and processes share it",
        f"{PACKED}::test_opening_2_gb_takes_no_memory",
        f"{READING}::test_processes_share_the_pages",
    ),
    "C033": shown(
        "only rows of integers are taken",
        f"{PACKED}::test_refuses_a_stream_and_floats",
        f"{READING}::test_refuses_what_has_no_rows_of_integers",
    ),
    "C034": shown(
        "packing has one place in a rank, and its state",
        "tests/contract/test_contract_conformance.py::test_other_workers_hosts_and_buffers",
        f"{ELASTIC}::test_a_chain_of_resumes_on_other_numbers_of_ranks",
    ),
    "C035": shown(
        "a row is the same whatever was read before, and in which process",
        f"{READING}::test_rows_are_a_table",
        f"{PACKED}::test_in_torchs_loader_with_spawned_workers",
    ),
    "C036": shown("a row is read in less than 20 microseconds", f"{PACKED}::test_a_look_up_takes_less_than_20_microseconds"),
    "D007": shown(
        "a mapped file is opened when it is used, and takes no memory",
        f"{READING}::test_nothing_is_open_before_the_first_use_and_after_close",
        f"{PACKED}::test_opening_2_gb_takes_no_memory",
    ),
    "D008": shown("(n - 1) // seq_len windows", f"{WINDOWS}::test_the_number_of_windows"),
    "D009": shown("windows as long, and labels one token on", f"{WINDOWS}::test_windows_and_labels"),
    # Formats
    "D010": Row(
        "text formats are read, and warned of where they are large",
        Later("more sources", "JSON Lines are read; CSV is refused by name, and nothing warns of training on large text files"),
    ),
    "D011": shown(
        "tokens in .npy at random",
        f"{PACKED}::test_rows_are_tensors_by_index",
        "tests/tokens/test_npy.py::test_reads_what_numpy_saved",
    ),
    "D012": Row("MDS is read", Later("more sources", "`aioloader preprocess --format mds` writes it; Mosaic's own library reads it")),
    "D013": Row("WebDataset tars are read", Later("more sources", "the suffix is refused by name")),
    "D014": shown(
        "Parquet: a place is file, row group and row",
        "tests/sources/test_parquet.py::test_rows_keep_the_contract_over_row_groups_and_files",
        "tests/sources/test_parquet.py::test_a_place_inside_a_large_row_group_is_found_again",
    ),
    "D015": shown(
        "an example goes all four stages",
        "tests/examples/test_pretrain_packed.py::test_one_rank_writes_the_files_and_both_train_on_them",
    ),
    # Samplers
    "C012": shown("the epoch is passed on to the sampler, once", f"{LOADER}::test_set_epoch_is_passed_on_once"),
    "C013": shown(
        "the restored epoch keeps its place, another does not",
        f"{SAMPLER}::test_only_another_epoch_discards_a_restored_place",
        f"{SAMPLER}::test_a_state_goes_on_after_the_samples_that_were_acknowledged",
    ),
    "C014": shown(
        "all ranks compute one order",
        f"{SAMPLING}::test_digests_tell_apart_what_would_deal_out_differently",
        f"{SAMPLER}::test_peers_of_one_data_parallel_coordinate_get_the_same_and_global_ranks_would_not",
    ),
    "C015": shown(
        "contiguous parts where asked for, which cannot be resized",
        f"{SAMPLING}::test_blocks_are_contiguous_slices",
        f"{SAMPLER}::test_blocks_are_not_dealt_anew",
    ),
    "C016": shown("a restored sampler begins there", f"{SAMPLER}::test_a_state_goes_on_after_the_samples_that_were_acknowledged"),
    "C020": shown(
        "what was not acknowledged comes again, and a short batch counts as it is",
        f"{SAMPLER}::test_a_dataloader_with_workers_resumes_after_the_batch_that_was_acknowledged",
        f"{SAMPLER}::test_samples_are_acknowledged_once",
        f"{LOADER}::test_a_state_goes_on_with_the_next_batch",
    ),
    "C037": shown(
        "ranks partition the indices",
        f"{SAMPLING}::test_a_kept_epoch_is_a_disjoint_cover_of_parts_that_differ_by_one",
        f"{LOADER}::test_ranks_get_what_the_sampler_deals_out",
    ),
    "C038": shown("tensor-parallel peers get the same, others do not", f"{LOADER}::test_peers_on_other_axes_get_identical_batches"),
    "C039": shown(
        "a seed of its own on a rank is found at the start",
        f"{MESH}::test_ranks_that_do_not_fit_all_say_so",
        f"{SAMPLER}::test_peers_of_one_data_parallel_coordinate_get_the_same_and_global_ranks_would_not",
    ),
    "C040": shown("nobody is asked for the order", f"{SAMPLER}::test_no_global_generator_is_read_or_moved_and_nothing_is_communicated"),
    "C041": shown("nor any global generator", f"{SAMPLER}::test_no_global_generator_is_read_or_moved_and_nothing_is_communicated"),
    "C042": shown("the rank has no default", f"{SAMPLER}::test_the_mesh_has_no_default"),
    "C045": shown("a tail that is dropped is told", f"{SAMPLER}::test_what_is_dropped_and_what_is_repeated_is_told"),
    "C046": shown(
        "so is one that is filled up, also with fewer samples than ranks",
        f"{SAMPLER}::test_what_is_dropped_and_what_is_repeated_is_told",
        f"{SAMPLER}::test_three_samples_for_eight_ranks_are_one_each_when_padded",
    ),
    "C047": shown("epochs are counted, and one is one", f"{LOADER}::test_an_epoch_that_nobody_sets_advances_by_itself"),
    "C048": shown(
        "other numbers of ranks go on exactly, or are refused",
        f"{SAMPLER}::test_a_run_goes_on_with_8_ranks_and_then_with_2",
        f"{SAMPLER}::test_blocks_are_not_dealt_anew",
    ),
    "C049": shown("from 4 ranks to 2 and 8", f"{LOADER}::test_what_is_left_goes_to_another_number_of_ranks_exactly_once"),
    "D001": shown("parts do not overlap", f"{SAMPLING}::test_a_dropped_tail_is_shorter_than_one_round"),
    "D002": shown(
        "torch's order where asked for, and a global rank is refused",
        f"{SAMPLER}::test_the_torch_order_is_that_of_torch_on_a_mesh_that_is_data_parallel_only",
        f"{LOADER}::test_a_sampler_by_global_rank_is_refused_where_that_is_wrong",
    ),
    "D004": shown("an epoch cannot be forgotten", f"{SAMPLER}::test_epochs_count_themselves_in_a_dataloader"),
    "D022": shown("another seed on one rank is found at the start", f"{MESH}::test_ranks_that_do_not_fit_all_say_so"),
    # Collators
    "C018": shown(
        "rows are stacked and get labels",
        f"{PACKED}::test_is_a_source_of_a_loader_with_worker_processes",
        f"{COLLATOR}::test_plain_samples_of_one_length_are_stacked",
    ),
    "C050": shown("a stack and labels for rows that are packed already", f"{COLLATOR}::test_plain_samples_of_one_length_are_stacked"),
    "C051": shown(
        "collators for pretraining, fine-tuning and preference pairs",
        "tests/collate/test_pretrain.py::test_packed_rows",
        "tests/collate/test_sft.py::test_three_ways_to_say_what_is_trained",
        "tests/collate/test_preference.py::test_chosen_rows_come_before_rejected_ones_and_prompts_are_not_trained",
    ),
    "C052": shown("none of them is the default", f"{LOADER}::test_there_is_no_default_collator_and_no_default_mesh"),
    # Loading
    "C017": shown(
        "workers fetch by index what an inline run fetches", f"{LOADER}::test_workers_give_what_an_inline_run_gives_and_stay_alive"
    ),
    "C019": shown(
        "batches are page-locked where there is CUDA",
        f"{PINNING}::test_batches_are_pinned_where_that_is_possible",
        f"{LOADER}::test_pin_memory_without_cuda_is_a_warning",
    ),
    "C043": shown("two workers, two batches each ahead", f"{LOADER}::test_a_stalled_consumer_is_not_run_away_from"),
    "C044": shown(
        "workers change copies, forked or spawned",
        f"{LOADER}::test_a_stalled_consumer_is_not_run_away_from",
        f"{PACKED}::test_in_torchs_loader_with_forked_workers",
        f"{PACKED}::test_in_torchs_loader_with_spawned_workers",
    ),
    "C053": shown("for and async for give the same", f"{LOADER}::test_async_for_gives_the_same_batches"),
    "C054": shown(
        "prefetching and page-locking are options",
        f"{LOADER}::test_a_stalled_consumer_is_not_run_away_from",
        f"{LOADER}::test_pin_memory_without_cuda_is_a_warning",
    ),
    "D003": shown("workers stay for the next epoch", f"{LOADER}::test_workers_give_what_an_inline_run_gives_and_stay_alive"),
    "D016": shown(
        "any number of workers gives the same",
        f"{LOADER}::test_workers_give_what_an_inline_run_gives_and_stay_alive",
        "tests/contract/test_contract_faults_order.py::test_the_length_of_an_epoch_does_not_depend_on_workers",
    ),
    "D017": shown("without CUDA one warning", f"{LOADER}::test_pin_memory_without_cuda_is_a_warning"),
    "D018": shown("workers are kept, asked or not", f"{LOADER}::test_workers_give_what_an_inline_run_gives_and_stay_alive"),
    "D019": shown("so many batches for each worker and no more", f"{LOADER}::test_a_stalled_consumer_is_not_run_away_from"),
}
