"""What to preprocess, and how: checked once, when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from aioloader.errors import ConfigError
from aioloader.options import check_choice, check_int, check_seconds

__all__ = ["PreprocessOptions"]

FORMATS: Final = ("npy", "pt", "bin", "mds")
PACKINGS: Final = ("none", "concat", "best_fit")
DTYPES: Final = ("auto", "uint16", "uint32", "int32", "int64")
ON_ERROR: Final = ("raise", "skip")

Format = Literal["npy", "pt", "bin", "mds"]
Packing = Literal["none", "concat", "best_fit"]
DType = Literal["auto", "uint16", "uint32", "int32", "int64"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessOptions:
    """The options of `preprocess`.

    Attributes:
        inputs: Files, directories or patterns of one kind: .jsonl and .ndjson (one document a line), .parquet (one a row), any text
            (one a file); or `hf:NAME`, a data set of the Hugging Face hub or a directory that `datasets.load_dataset` takes.
        tokenizer: A tokenizer.json file, or a path or name for `transformers.AutoTokenizer`.
        output: The directory to write to; made where it is missing.
        format: "npy", "pt" (`torch.load(mmap=True)`), "bin" (Megatron's .bin and .idx) or "mds" (Mosaic's shards).
        packing: "concat" lays all documents end to end and cuts that stream every `seq_len` tokens, the tail left out; "best_fit" never
            cuts a document that fits in a row, and pads rows; "none" writes the stream uncut.
        seq_len: Tokens per row; None with packing="none".
        text_field: The field or column that holds the text.
        split: The split of a Hugging Face data set; `hub_config` the name of its configuration.
        bos: The token that begins each document: its text, or its id as "id:5"; "auto" for the tokenizer's own, None for none.
        eos: The token that ends each document, likewise.
        pad: The token that fills rows up with packing="best_fit": its text, or its id as "id:5"; "auto" for the one of `eos`.
        dtype: The type of the tokens on disk; "auto": the narrowest that the format has for the vocabulary.
        special_tokens_in_text: Whether text that reads like a special token becomes that token. By default it stays text, so that no
            document can end another.
        per_input: Write a file of its own, `tokens_<i>`, for each of `inputs`.
        limit: Read so many documents at most.
        on_error: "raise" stops at the first document that fails; "skip" leaves such documents out and reports them.
        workers: Worker processes; 0 runs everything in this one. None: one per CPU.
        overwrite: Replace what an earlier run with other settings wrote.
        verify: Compare all files with their checksums where a finished output is used again.
        save_every_s: Seconds after which the output is flushed to the disk and the place is saved, to go on from after a kill.

    Raises:
        ConfigError: An option is wrong, or two do not go together.
    """

    inputs: tuple[str, ...]
    tokenizer: str
    output: str
    format: Format = "npy"
    packing: Packing = "concat"
    seq_len: int | None = None
    text_field: str = "text"
    split: str = "train"
    hub_config: str | None = None
    bos: str | None = None
    eos: str | None = "auto"
    pad: str = "auto"
    dtype: DType = "auto"
    special_tokens_in_text: bool = False
    per_input: bool = False
    limit: int | None = None
    on_error: Literal["raise", "skip"] = "raise"
    workers: int | None = None
    overwrite: bool = False
    verify: bool = False
    save_every_s: float = 2.0

    def __post_init__(self) -> None:
        """Check the options."""
        inputs: object = self.inputs
        if not isinstance(inputs, tuple) or not inputs:
            raise ConfigError(
                "inputs", expected="a tuple of one input or more", got=repr(self.inputs), do="name files, directories or patterns"
            )
        for name, value in (("tokenizer", self.tokenizer), ("output", self.output), ("text_field", self.text_field)):
            if not value:
                raise ConfigError(name, expected="a name", got=repr(value), do="give one")
        check_choice("format", self.format, FORMATS)
        check_choice("packing", self.packing, PACKINGS)
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("on_error", self.on_error, ON_ERROR)
        self._check_rows()
        if self.limit is not None:
            check_int("limit", self.limit, at_least=1, do="leave it out to read everything")
        if self.workers is not None:
            check_int("workers", self.workers, at_least=0, do="use 0 to run in this process, or leave it out for one per CPU")
        if self.save_every_s != 0:  # 0: after every batch
            check_seconds("save_every_s", self.save_every_s)

    def _check_rows(self) -> None:
        if self.packing != "none":
            check_int("seq_len", self.seq_len, at_least=1, do="give the tokens of a row, or use packing 'none' for an uncut stream")
        elif self.seq_len is not None:
            do = "leave it out, an uncut stream is cut in training; or use packing 'concat'"
            raise ConfigError("seq_len", expected="none with packing 'none'", got=repr(self.seq_len), do=do)
        elif self.format == "mds":
            raise ConfigError("packing", expected="rows for format 'mds'", got="'none'", do="use packing 'concat' or another format")
