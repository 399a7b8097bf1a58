"""`torch.distributed.checkpoint`, with digests taken while it writes and no code run while it reads.

What DCP does by itself: tensors are read with ``weights_only``; but its ``.metadata`` is a pickle, and values that are
not tensors are read back with ``weights_only=False``. So a checkpoint here holds tensors alone (`tree.to_bytes`), and
``.metadata`` goes through an unpickler that knows DCP's own classes and no others.
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
from pathlib import Path
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

if TYPE_CHECKING:
    from holdfast.runtime.checkpoint_writer.rank_shard import Item

METADATA: Final = ".metadata"
"""The file in which DCP says which tensor lies where."""


class WritePace:
    """Lets so many bytes a second pass, whoever of several threads writes them."""

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
    """A file being written, whose digest grows with it: the bytes are judged as they were meant, not as the disk returns them."""

    def __init__(self, raw: IO[bytes], pace: WritePace, remembering: Callable[[], AbstractContextManager[None]]) -> None:
        self._raw, self._pace, self._remembering, self._digest, self._size = raw, pace, remembering, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> int:
        """Write all of *data*."""
        self._pace.wait(len(data))
        with self._remembering():  # torch makes words of its own of an error
            written = self._raw.write(data)
        self._digest.update(data)
        self._size += written
        return written

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (tell, flush, fileno and close are the file's own)
        return getattr(self._raw, name)

    def written(self) -> WrittenFile:
        """Return size and digest of what was written so far."""
        return WrittenFile(self._size, self._digest.hexdigest())


class _DigestingFiles(FileSystem):
    """DCP's file system, keeping the digest of every file and the first error of the world, which torch may hide."""

    def __init__(self, pace: WritePace) -> None:
        self._pace = pace
        self.written: dict[str, WrittenFile] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        """Open *path*; remember its digest when it is closed."""
        with self._remembering(), super().create_stream(path, mode) as raw:
            stream = _DigestingStream(cast("IO[bytes]", raw), self._pace, self._remembering)
            yield stream
            if not stream.closed:
                stream.flush()
            self.written[Path(path).name] = stream.written()

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make the folder *path*."""
        with self._remembering():
            super().mkdir(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file, and what is known of it."""
        with self._remembering():
            super().rename(path, new_path)
            self.written[Path(new_path).name] = self.written.pop(Path(path).name)

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            raise


class _DigestWriter(FileSystemWriter):
    """DCP's writer over files that digest."""

    def __init__(self, folder: Path, bandwidth: WritePace | None = None) -> None:
        super().__init__(folder, sync_files=True)
        self.files = _DigestingFiles(bandwidth or WritePace(None))
        self.fs = self.files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[Any]]:
        """Write this rank's part; whatever goes wrong leaves as a ``RuntimeError`` with its words."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:  # noqa: BLE001 (one rank that cannot say what went wrong would leave the others waiting)
            raise RuntimeError(f"{type(error).__name__}: {error}") from None


class StorageTrouble(Exception):
    """A checkpoint could not be written; *cause* is this rank's own error, if the trouble is this rank's."""

    def __init__(self, words: str, cause: OSError | None) -> None:
        super().__init__(words, cause)
        self.words, self.cause = words, cause


# -- one rank alone -----------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """A box of a tensor in a file, in values that JSON can hold: shape of the whole, where the box begins, its sizes, and where it lies."""

    key: str
    dtype: str
    shape: Sequence[int]
    offsets: Sequence[int]
    sizes: Sequence[int]
    file: str
    begin: int
    length: int

    def named(self) -> MetadataIndex:
        """Return what DCP calls it."""
        return MetadataIndex(self.key, torch.Size(self.offsets))


class _Given(DefaultSavePlanner):
    """DCP's planner for tensors that are at hand."""

    def __init__(self, data: Mapping[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self._data = data

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return what is to be written."""
        return self._data[write_item.index]


def write_alone(items: Iterable[Item], folder: Path, rank: int, pace: WritePace) -> tuple[dict[str, WrittenFile], list[Chunk]]:
    """Write *rank*'s *items* below *folder*, no word with other ranks; return the files and what lies where in them.

    Raises `StorageTrouble`. What the ranks have written becomes a checkpoint by `write_metadata`.
    """
    writer = _DigestWriter(folder, pace)
    writer.set_up_storage_writer(is_coordinator=False, rank=rank, use_collectives=False)
    wanted, data = {}, {}
    for item in items:
        index = MetadataIndex(item.key, torch.Size(item.box.offsets))
        part = ChunkStorageMetadata(torch.Size(item.box.offsets), torch.Size(item.box.sizes))
        told = TensorWriteData(part, TensorProperties(dtype=item.data.dtype), torch.Size(item.shape))
        wanted[index], data[index] = WriteItem(index, WriteItemType.SHARD, tensor_data=told), item.data
    try:
        plan = writer.prepare_local_plan(SavePlan(list(wanted.values())))
        results = writer.write_data(plan, _Given(data)).wait()
    except (OSError, RuntimeError) as failed:
        raise StorageTrouble(str(failed), writer.files.error) from failed
    chunks = []
    for result in results:
        written, place = wanted[result.index].tensor_data, result.storage_data
        assert written is not None
        dtype = str(written.properties.dtype).removeprefix("torch.")
        shapes = tuple(written.size), tuple(written.chunk.offsets), tuple(written.chunk.sizes)
        chunks.append(Chunk(result.index.fqn, dtype, *shapes, place.relative_path, place.offset, place.length))
    return writer.files.written, chunks


def write_metadata(chunks: Iterable[Chunk], folder: Path) -> dict[str, WrittenFile]:
    """Say in *folder* what lies where, as DCP wants it; raise `StorageTrouble` when a tensor is not there as a whole."""
    tensors: dict[str, TensorStorageMetadata] = {}
    results = []
    for one in chunks:
        shape, dtype = torch.Size(one.shape), getattr(torch, one.dtype)
        found = tensors.setdefault(one.key, TensorStorageMetadata(TensorProperties(dtype=dtype), shape, []))
        if (found.size, found.properties.dtype) != (shape, dtype):
            raise StorageTrouble(f"the ranks do not agree on the shape or type of '{one.key}'", None)
        found.chunks.append(ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)))
        results.append(WriteResult(one.named(), one.length, _StorageInfo(one.file, one.begin, one.length)))
    for key, tensor in tensors.items():
        there = sum(chunk.sizes.numel() for chunk in tensor.chunks)
        if there != tensor.size.numel():
            raise StorageTrouble(f"of '{key}' {there} of {tensor.size.numel()} elements were written", None)
    writer = _DigestWriter(folder)
    # As `dcp_to_torch_save` gives it back: the model's tensors in a dict of their own.
    places = {key: tuple(key.split(".", 1)) if key.startswith("model.") else (key,) for key in tensors}
    try:
        writer.finish(Metadata(dict(tensors), planner_data=places), [results])
    except OSError as failed:
        raise StorageTrouble(str(failed), writer.files.error) from failed
    return {METADATA: writer.files.written[METADATA]}


_RECORDS: Final = frozenset(
    {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
        "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_StorageInfo",
    }
)  # fmt: skip
"""Classes of DCP's whose objects are made by setting their fields."""


class _Unpickler(pickle._Unpickler):  # noqa: SLF001 (the one in Python: in the other nothing can be said about BUILD; it takes twice as long)
    """Read DCP's metadata: its own classes, torch's dtypes and layouts, and nothing that could act.

    Nor is anything changed that was there before: fields are set of DCP's records that were made here, and of no class or function.
    """

    def _build(self) -> None:
        changed = self.stack[-2]  # type: ignore[attr-defined]
        made = type(changed)
        if made.__name__ not in _RECORDS or not made.__module__.startswith("torch.distributed.checkpoint."):
            raise pickle.UnpicklingError(f"what would change {str(changed)[:80]} does not belong into a checkpoint's metadata")
        pickle._Unpickler.load_build(self)  # type: ignore[attr-defined] # noqa: SLF001

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}  # type: ignore[dict-item] # noqa: SLF001, RUF012

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 (the type of the overridden method)
        """Return the class *name* of *module* if DCP's metadata may hold it."""
        torch_value = module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))
        known = {
            "torch.serialization": {"_get_layout"},
            "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
            "torch.distributed.checkpoint.metadata": {
                "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
                "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
            },
            "pathlib": {"PosixPath"},
        }  # fmt: skip
        if torch_value or name in known.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint's metadata")


def _member(kind: object, name: object) -> object:
    """Return the member *name* of the enumeration *kind*: Python 3.11.0 to 3.11.3 pickle a member as ``getattr(kind, name)``."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and isinstance(name, str) and name in kind.__members__:
        return kind.__members__[name]
    raise pickle.UnpicklingError("builtins.getattr does not belong into a checkpoint's metadata")


class CheckpointReader(FileSystemReader):
    """DCP's reader of one checkpoint, with its metadata read once and safely."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with (folder / METADATA).open("rb") as file:
            self._metadata: Metadata = _Unpickler(file).load()
        self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:  # noqa: ARG002 (DCP's signature)
        """Return the metadata."""
        return self._metadata

    def stored(self, key: str) -> TensorStorageMetadata:
        """Return size and type of the tensor stored as *key*; raise ``KeyError`` if there is none."""
        found = self._metadata.state_dict_metadata[key]
        if not isinstance(found, TensorStorageMetadata):
            raise KeyError(key)
        return found

    def has(self, key: str) -> bool:
        """Say whether a tensor is stored as *key*."""
        return isinstance(self._metadata.state_dict_metadata.get(key), TensorStorageMetadata)

    def empty(self, key: str) -> Tensor:
        """Return an empty tensor that fits what is stored as *key*."""
        found = self.stored(key)
        return torch.empty(found.size, dtype=found.properties.dtype)

    def fill(self, tensors: dict[str, Tensor]) -> None:
        """Read each of *tensors* from what is stored under its key; every rank for itself, no communication."""
        if not tensors:
            return
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as in `write`
            load(tensors, storage_reader=self, planner=planner, no_dist=True)
