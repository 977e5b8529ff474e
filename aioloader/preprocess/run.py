"""Offline preprocessing as a run of the loader: inputs -> tokenizer in the pool -> rows -> files that grow.

    metadata.json    there only when all is written: the run finished
    progress.json    there while it is not: loader state, writer position, and what decides the output

A place is saved once the batch after it has come: the state after the last batch of an epoch is the beginning of the next one, and a
run that was killed between the last batch and `metadata.json` would read everything again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aioloader.errors import ConfigError, PreprocessError, SourceError, WorkerError
from aioloader.faults import Quarantine
from aioloader.loader import ArrayLoader
from aioloader.order.mesh import Mesh
from aioloader.preprocess.directory import OutputDirectory
from aioloader.preprocess.failures import FailedDocument, read_failure_log, read_failures, write_failures
from aioloader.preprocess.inputs import Part, place_of
from aioloader.preprocess.options import PreprocessOptions
from aioloader.preprocess.plan import PreprocessPlan, make_plan, refuse_differences
from aioloader.preprocess.progress import DonePart, Progress, read_progress, write_progress
from aioloader.preprocess.result import Event, Preprocessed
from aioloader.preprocess.rows import layout_of
from aioloader.tokens.metadata import Metadata, file_facts, read_metadata, verify, write_metadata
from aioloader.tokens.metadata import Part as WrittenPart
from aioloader.tokens.writing import TokenWriter, open_writer

__all__ = ["preprocess"]

Notify = Callable[[Event], None]

MEMORY_LIMIT = "256MiB"
"""Of text and tokens in flight: seconds of work for any number of workers."""


def preprocess(options: PreprocessOptions, *, on_event: Notify | None = None) -> Preprocessed:
    """Tokenize and pack documents into token files, in the order of the inputs, in memory that does not grow with them.

    The files depend on the inputs, the tokenizer and the settings only: not on the number of workers, nor on how often the run was
    killed and started again. A killed run goes on where it stood when the same call is made again; a finished one is used as it is.
    Several processes may call this with one output at once: one writes, the others wait and use what it wrote.

    Args:
        options: What to do.
        on_event: Called about once per batch, with where the run stands.

    Raises:
        ConfigError: An option is wrong, or the output is that of other settings or inputs; the message lists the differences.
        PreprocessError: With on_error="raise": a document failed. Mend it and start again, or use on_error="skip".
        SourceError: An input cannot be read, the output is damaged or cannot be written.
    """
    plan = make_plan(options)
    try:
        return _preprocess(plan, on_event or _ignore)
    except OSError as error:
        raise SourceError(
            f"output {options.output!r}: expected room for it and leave to write it, got {error}; mend that and give the same command "
            "again, it goes on where this one stood."
        ) from error


def _preprocess(plan: PreprocessPlan, notify: Notify) -> Preprocessed:
    directory = plan.directory
    with directory.locked(lambda: notify(Event(kind="waiting"))):
        if plan.options.overwrite and not _is_same(plan, directory):
            directory.clear()
        if directory.metadata.exists():
            return _reuse(plan, directory)
        return _Run(plan, directory, notify).finish()


class _Run:
    """One run, from where the last one stood."""

    def __init__(self, plan: PreprocessPlan, directory: OutputDirectory, notify: Notify) -> None:
        self._plan = plan
        self._directory = directory
        self._notify = notify
        self._num_documents = 0
        self._num_tokens = 0
        self._progress = self._begin()

    def finish(self) -> Preprocessed:
        """Write what is missing."""
        while len(self._progress.done) < len(self._plan.parts):
            done = (*self._progress.done, self._write_part(len(self._progress.done)))
            self._progress = Progress(config=self._plan.config, done=done)
            if len(done) < len(self._plan.parts):
                self._save(self._progress)
        return self._conclude()

    def _begin(self) -> Progress:
        found = read_progress(self._directory.progress)
        if found is not None and not found.done and found.state is None and found.config != self._plan.config:
            self._directory.clear()  # nothing was saved, so that nothing is lost: the first document may have failed for a wrong setting
            found = None
        if found is None:
            self._directory.refuse_foreign()
            found = Progress(config=self._plan.config)
            self._save(found)  # before any data: what lies in the directory from now on is ours
        else:
            where = f"unfinished output {str(self._directory.path)!r}"
            refuse_differences(where, found.config, self._plan.config)
            if num_failed := _num_failed(self._plan, found):
                got = f"one without {num_failed} that failed"
                raise ConfigError(
                    where, expected="a run with all documents", got=got, do="use --on-error skip, or --overwrite to start anew"
                )
            if found.done or found.state is not None:
                self._notify(Event(kind="resumed"))
        return found

    def _save(self, progress: Progress) -> None:
        write_progress(self._directory.progress, progress)

    def _write_part(self, number: int) -> DonePart:
        """Write one file of tokens, from where it was left."""
        part, options, start = self._plan.parts[number], self._plan.options, self._progress
        writer = open_writer(
            options.format,
            self._directory.data_path(number),
            dtype=self._plan.tokens.dtype,
            seq_len=options.seq_len,
            position=start.position,
        )
        try:
            with self._loader(part) as loader:
                if start.state is not None:
                    loader.load_state_dict(start.state)
                num_padding = self._copy(part, loader, writer)
                state = loader.state_dict()
            written = writer.close()
        except (PreprocessError, WorkerError) as error:
            raise _placed(error, part) from error
        finally:
            with contextlib.suppress(OSError):  # a disk that is full says so once more, for what it could not take
                writer.release()
        counts = state["lanes"]["0"]["counts"]
        return DonePart(
            name=self._directory.data_path(number).relative_to(self._directory.path).as_posix(),
            files=tuple(file.relative_to(self._directory.path).as_posix() for file in written.files),
            num_tokens=written.num_tokens,
            num_rows=written.num_rows,
            num_segments=written.num_documents,
            dropped_tail=written.dropped_tail,
            num_documents=counts["samples"],
            num_padding=num_padding,
            failed=tuple((name, row) for name, row in state["lanes"]["0"]["quarantined"]),
            num_read=counts["records"],
        )

    def _loader(self, part: Part) -> ArrayLoader:
        options, tokens = self._plan.options, self._plan.tokens
        batching, collator = layout_of(options, tokens)
        source = part.source
        if options.limit is not None:
            source = part.limited(options.limit - sum(done.num_read for done in self._progress.done))
        return ArrayLoader(
            source,
            preprocess=tokens.encoding(options.text_field),
            worker_init=tokens.tokenizer.start,
            batch=batching,
            collate=collator,
            mesh=Mesh(),  # also under torchrun: each rank that calls wants all of it
            memory_limit=MEMORY_LIMIT,
            end="pad",
            workers=options.workers,
            on_error=Quarantine(log=str(self._directory.failure_log)) if options.on_error == "skip" else "raise",
        )

    def _copy(self, part: Part, loader: ArrayLoader, writer: TokenWriter) -> int:
        """Write all batches and return the tokens of padding."""
        num_padding, due = self._progress.num_padding, time.monotonic() + self._plan.options.save_every_s
        waiting: Progress | None = None
        for batch in loader:
            if waiting is not None:
                self._save(waiting)
                waiting = None
            tokens = batch["input_ids"]
            writer.append(tokens, batch["document_ends"])
            if "row_lengths" in batch:
                num_padding += tokens.size - int(batch["row_lengths"].sum())
            state = None
            if time.monotonic() >= due:
                state = batch.state()
                waiting = replace(self._progress, state=state, position=writer.flush(), num_padding=num_padding)
                due = time.monotonic() + self._plan.options.save_every_s
            self._tell(part, len(batch.samples), tokens.size, state)
        return num_padding

    def _tell(self, part: Part, num_documents: int, num_tokens: int, state: Any) -> None:
        self._num_documents += num_documents
        self._num_tokens += num_tokens
        fraction = None if state is None else part.fraction(state["source"]["cursor"])
        self._notify(Event(kind="running", num_documents=self._num_documents, num_tokens=self._num_tokens, fraction=fraction))

    def _conclude(self) -> Preprocessed:
        """Say that all is written, and remove what was needed only until then."""
        directory, done = self._directory, self._progress.done
        failures = self._failures()
        num_documents = sum(part.num_documents for part in done)
        metadata = None
        if failures and not num_documents:
            directory.clear()
        else:
            write_failures(directory.failures, failures)
            metadata = _metadata(self._plan, directory, self._progress, len(failures))
            write_metadata(directory.path, metadata)
        directory.progress.unlink(missing_ok=True)
        directory.failure_log.unlink(missing_ok=True)
        status: Any = "written" if metadata is not None else "failed"
        return Preprocessed(status=status, output=directory.path, num_documents=num_documents, failures=failures, metadata=metadata)

    def _failures(self) -> list[FailedDocument]:
        errors = read_failure_log(self._directory.failure_log)
        return [
            FailedDocument(place_of(record, part), errors.get(record, "not recorded"))
            for part, done in zip(self._plan.parts, self._progress.done, strict=True)
            for record in done.failed
        ]


def _metadata(plan: PreprocessPlan, directory: OutputDirectory, progress: Progress, num_failed: int) -> Metadata:
    options, tokens, done = plan.options, plan.tokens, progress.done
    settings = tokens.settings()
    names = [name for part in done for name in part.files]
    return Metadata(
        format=options.format,
        dtype=tokens.dtype.name,
        seq_len=options.seq_len,
        parts=tuple(
            WrittenPart(
                name=part.name,
                num_tokens=part.num_tokens,
                num_rows=part.num_rows,
                num_documents=part.num_segments,
                dropped_tail=part.dropped_tail,
            )
            for part in done
        ),
        files=file_facts(directory.path, [directory.path / name for name in names]),
        tokenizer={"name": options.tokenizer, **settings["tokenizer"], "bos": settings["bos"], "eos": settings["eos"]},
        vocab_size=tokens.tokenizer.vocab_size,
        eos_id=tokens.after[0] if tokens.after else None,
        packing=options.packing,
        source=plan.config["inputs"],
        details={
            "config": plan.config,
            "inputs": list(options.inputs),
            "documents": sum(part.num_documents for part in done),
            "failed_documents": num_failed,
            "padding_id": tokens.pad,
            "padding_tokens": sum(part.num_padding for part in done),
        },
    )


def _placed(error: PreprocessError | WorkerError, part: Part) -> PreprocessError | WorkerError:
    """Return the error of a document with the place where people find it."""
    if error.record is None:
        return error
    return PreprocessError(
        f"{place_of(error.record, part)}: {error.message}; mend the document, or leave such out with --on-error skip", record=error.record
    )


def _is_same(plan: PreprocessPlan, directory: OutputDirectory) -> bool:
    """Return whether what is there is good and of this plan, so that there is nothing to overwrite."""
    try:
        if directory.metadata.exists():
            _reuse(plan, directory)
            return True
        found = read_progress(directory.progress)
    except (ConfigError, SourceError):
        return False
    return found is not None and found.config == plan.config and not _num_failed(plan, found)


def _num_failed(plan: PreprocessPlan, found: Progress) -> int:
    """Return how many documents an unfinished run has left out, where none may be."""
    state: Any = found.state
    here = [] if state is None else state["lanes"]["0"]["quarantined"]
    return sum(len(part.failed) for part in found.done) + len(here) if plan.options.on_error == "raise" else 0


def _reuse(plan: PreprocessPlan, directory: OutputDirectory) -> Preprocessed:
    """Return what an earlier run wrote, if it is what this one would write."""
    where = f"output {str(directory.path)!r}"
    metadata = verify(directory.path) if plan.options.verify else read_metadata(directory.path)
    refuse_differences(where, metadata.details.get("config"), plan.config)
    for name, facts in metadata.files.items():
        path = directory.path / name
        size = path.stat().st_size if path.is_file() else None
        if size != facts.num_bytes:
            raise SourceError(f"{path}: expected {facts.num_bytes} bytes, got {size or 'no file'}; write it again with --overwrite.")
    failures = read_failures(directory.failures)
    if failures and plan.options.on_error == "raise":
        got = f"one without {len(failures)} that failed, the first {failures[0].place}: {failures[0].error}"
        raise ConfigError(where, expected="an output with all documents", got=got, do="use --on-error skip, or mend them")
    directory.progress.unlink(missing_ok=True)  # of a run that was killed after its last step but one
    directory.failure_log.unlink(missing_ok=True)
    num_documents = int(str(metadata.details["documents"]))
    return Preprocessed(status="reused", output=directory.path, num_documents=num_documents, failures=failures, metadata=metadata)


def _ignore(event: Event) -> None:
    """Take no notice."""
