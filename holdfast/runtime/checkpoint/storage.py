"""`torch.distributed.checkpoint` (DCP) with digests computed while it writes, and without running code while it reads.

DCP reads tensors with ``weights_only``; but its ``.metadata`` is a pickle, and it reads values that are not tensors with
``weights_only=False``. So a checkpoint here contains only tensors (`tree.to_bytes`), and ``.metadata`` goes through an unpickler that
accepts DCP's own classes and no others.
"""

from __future__ import annotations

import enum
import hashlib
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PosixPath
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult

from holdfast.runtime.checkpoint.manifest import WrittenFile
from holdfast.runtime.checkpoint.storage_errors import StorageError

if TYPE_CHECKING:
    from holdfast.runtime.checkpoint_writer.rank_shard import Item

METADATA: Final = ".metadata"
"""DCP's index: which tensor is in which file."""


class WriteRate:
    """Limits the bytes per second that several threads write together."""

    def __init__(self, bandwidth: int | None) -> None:
        self._bandwidth, self._lock, self._free_at = bandwidth, threading.Lock(), 0.0

    def wait(self, size: int) -> None:
        """Wait until *size* bytes may be written."""
        if self._bandwidth is None:
            return
        with self._lock:
            begin = max(time.monotonic(), self._free_at)
            self._free_at = begin + size / self._bandwidth
        time.sleep(max(0.0, begin - time.monotonic()))


class _DigestingStream:
    """A file being written, with a digest of the bytes as they were meant, not as the disk returns them."""

    def __init__(self, raw: IO[bytes], rate: WriteRate, keeping_errors: Callable[[], AbstractContextManager[None]]) -> None:
        self._raw, self._rate, self._keeping_errors, self._digest, self._size = raw, rate, keeping_errors, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> int:
        """Write all of *data*."""
        self._rate.wait(len(data))
        with self._keeping_errors():  # torch replaces the error
            written = self._raw.write(data)
        self._digest.update(data)
        self._size += written
        return written

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (tell, flush, fileno and close are the file's own)
        return getattr(self._raw, name)

    def written(self) -> WrittenFile:
        """Return size and digest of the bytes written so far."""
        return WrittenFile(self._size, self._digest.hexdigest())


class _DigestingFiles(FileSystem):
    """DCP's file system, which keeps the digest of every file and the first ``OSError``, which torch may hide."""

    def __init__(self, rate: WriteRate) -> None:
        self._rate = rate
        self.written: dict[str, WrittenFile] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        """Open *path*; keep its digest when it is closed."""
        with self._keeping_errors(), super().create_stream(path, mode) as raw:
            stream = _DigestingStream(cast("IO[bytes]", raw), self._rate, self._keeping_errors)
            yield stream
            if not stream.closed:
                stream.flush()
            self.written[Path(path).name] = stream.written()

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Create the folder *path*."""
        with self._keeping_errors():
            super().mkdir(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file, and the entry of its digest."""
        with self._keeping_errors():
            super().rename(path, new_path)
            self.written[Path(new_path).name] = self.written.pop(Path(path).name)

    @contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            raise


class _DigestWriter(FileSystemWriter):
    """DCP's writer over `_DigestingFiles`."""

    def __init__(self, folder: Path, rate: WriteRate | None = None) -> None:
        super().__init__(folder, sync_files=True)
        self.files = _DigestingFiles(rate or WriteRate(None))
        self.fs = self.files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[Any]]:
        """Write this rank's part; every error is raised as a ``RuntimeError`` with its text."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:  # noqa: BLE001 (a rank that cannot report its error would leave the others waiting)
            raise RuntimeError(f"{type(error).__name__}: {error}") from None


class WriteFailed(Exception):
    """A checkpoint could not be written; *cause* is the ``OSError`` of this rank, if there was one."""

    def __init__(self, text: str, cause: OSError | None) -> None:
        super().__init__(text, cause)
        self.text, self.cause = text, cause

    def as_storage_error(self) -> StorageError:
        """Return the fault to report."""
        return StorageError("checkpoint-write-failed", self.text) if self.cause is None else StorageError.of(self.cause)


# -- writing one rank's part ----------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """A box of a tensor in a file, as JSON values: shape of the tensor, the box's offsets and sizes, and its place in the file."""

    key: str
    dtype: str
    shape: Sequence[int]
    offsets: Sequence[int]
    sizes: Sequence[int]
    file: str
    begin: int
    length: int


class _GivenTensors(DefaultSavePlanner):
    """DCP's planner for tensors that are at hand."""

    def __init__(self, data: Mapping[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self._data = data

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the tensor to be written."""
        return self._data[write_item.index]


def write_items(items: Iterable[Item], folder: Path, rank: int, rate: WriteRate) -> tuple[dict[str, WrittenFile], list[Chunk]]:
    """Write *rank*'s *items* below *folder* without communication; return the files and the chunks in them.

    Raise `WriteFailed`. `write_metadata` makes a checkpoint of what all ranks have written.
    """
    writer = _DigestWriter(folder, rate)
    writer.set_up_storage_writer(is_coordinator=False, rank=rank, use_collectives=False)
    write, data = {}, {}
    for item in items:
        index = MetadataIndex(item.key, torch.Size(item.box.offsets))
        part = ChunkStorageMetadata(torch.Size(item.box.offsets), torch.Size(item.box.sizes))
        tensor = TensorWriteData(part, TensorProperties(dtype=item.data.dtype), torch.Size(item.shape))
        write[index], data[index] = WriteItem(index, WriteItemType.SHARD, tensor_data=tensor), item.data
    try:
        plan = writer.prepare_local_plan(SavePlan(list(write.values())))
        results = writer.write_data(plan, _GivenTensors(data)).wait()
    except (OSError, RuntimeError) as failed:
        raise WriteFailed(str(failed), writer.files.error) from failed
    chunks = []
    for result in results:
        written, place = write[result.index].tensor_data, result.storage_data
        assert written is not None
        dtype = str(written.properties.dtype).removeprefix("torch.")
        shapes = tuple(written.size), tuple(written.chunk.offsets), tuple(written.chunk.sizes)
        chunks.append(Chunk(result.index.fqn, dtype, *shapes, place.relative_path, place.offset, place.length))
    return writer.files.written, chunks


def write_metadata(chunks: Iterable[Chunk], folder: Path) -> dict[str, WrittenFile]:
    """Write DCP's index of all *chunks* into *folder*; raise `WriteFailed` when a tensor is not complete."""
    tensors: dict[str, TensorStorageMetadata] = {}
    results = []
    for one in chunks:
        shape, dtype = torch.Size(one.shape), getattr(torch, one.dtype)
        found = tensors.setdefault(one.key, TensorStorageMetadata(TensorProperties(dtype=dtype), shape, []))
        if (found.size, found.properties.dtype) != (shape, dtype):
            raise WriteFailed(f"the ranks disagree on the shape or dtype of '{one.key}'", None)
        found.chunks.append(ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)))
        results.append(
            WriteResult(MetadataIndex(one.key, torch.Size(one.offsets)), one.length, _StorageInfo(one.file, one.begin, one.length))
        )
    for key, tensor in tensors.items():
        written = sum(chunk.sizes.numel() for chunk in tensor.chunks)
        if written != tensor.size.numel():
            raise WriteFailed(f"of '{key}' {written} of {tensor.size.numel()} elements were written", None)
    writer = _DigestWriter(folder)
    # `dcp_to_torch_save` returns the model's tensors in a dict of their own.
    places = {key: tuple(key.split(".", 1)) if key.startswith("model.") else (key,) for key in tensors}
    try:
        writer.finish(Metadata(dict(tensors), planner_data=places), [results])
    except OSError as failed:
        raise WriteFailed(str(failed), writer.files.error) from failed
    return {METADATA: writer.files.written[METADATA]}


_RECORDS: Final = frozenset(
    {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
        "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_StorageInfo",
    }
)  # fmt: skip
"""DCP's classes whose objects are created by setting their fields."""


_PATHS: Final = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}
"""What a path is called in a pickle; the second by Python 3.13 alone, whose checkpoints other versions read too."""


class _Unpickler(pickle._Unpickler):  # noqa: SLF001 (the one in Python, half as fast: the other has no hook for BUILD)
    """Reads DCP's metadata: its own classes, torch's dtypes and layouts, and nothing that could run code.

    It changes no existing object either: fields are set only on DCP's records that were created here.
    """

    def _build(self) -> None:
        changed = self.stack[-2]  # type: ignore[attr-defined]
        made = type(changed)
        if made.__name__ not in _RECORDS or not made.__module__.startswith("torch.distributed.checkpoint."):
            raise pickle.UnpicklingError(f"changing {str(changed)[:80]} is not allowed in a checkpoint's metadata")
        pickle._Unpickler.load_build(self)  # type: ignore[attr-defined] # noqa: SLF001

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}  # type: ignore[dict-item] # noqa: SLF001, RUF012

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 (the type of the overridden method)
        """Return the class *name* of *module* if DCP's metadata may contain it."""
        torch_value = module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))
        known = {
            "torch.serialization": {"_get_layout"},
            "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
            "torch.distributed.checkpoint.metadata": {
                "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
                "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
            },
        }  # fmt: skip
        if (module, name) in _PATHS:
            return PosixPath
        if torch_value or name in known.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint's metadata")


def _member(kind: object, name: object) -> object:
    """Return the member *name* of the enumeration *kind*: Python 3.11.0 to 3.11.3 pickle a member as ``getattr(kind, name)``."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and isinstance(name, str) and name in kind.__members__:
        return kind.__members__[name]
    raise pickle.UnpicklingError("builtins.getattr is not allowed in a checkpoint's metadata")


class CheckpointReader(FileSystemReader):
    """DCP's reader of one checkpoint, whose metadata is read once and safely."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with (folder / METADATA).open("rb") as file:
            self._metadata: Metadata = _Unpickler(file).load()
        self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:  # noqa: ARG002 (DCP's signature)
        """Return the metadata."""
        return self._metadata

    def stored(self, key: str) -> TensorStorageMetadata:
        """Return size and dtype of the tensor stored as *key*; raise ``KeyError`` if there is none."""
        found = self._metadata.state_dict_metadata[key]
        if not isinstance(found, TensorStorageMetadata):
            raise KeyError(key)
        return found

    def has(self, key: str) -> bool:
        """Return whether a tensor is stored as *key*."""
        return isinstance(self._metadata.state_dict_metadata.get(key), TensorStorageMetadata)

    def empty(self, key: str) -> Tensor:
        """Return an empty tensor with the size and dtype of the one stored as *key*."""
        found = self.stored(key)
        return torch.empty(found.size, dtype=found.properties.dtype)

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Fill each of *tensors* with what is stored under its key, without communication."""
        if not tensors:
            return
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the missing process group
            load(tensors, storage_reader=self, planner=planner, no_dist=True)
