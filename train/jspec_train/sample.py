"""One prepared sample, and the record it is stored as."""

import dataclasses
import hashlib
import json

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

FEATURE_TYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One document of tokens, which of them are trained on, and what the target computed there."""

    id: str  # names it in messages
    ids: np.ndarray  # int32 [length]
    loss_mask: np.ndarray  # bool [length]: the token here is one that the drafter learns to predict
    task: str = ""  # figures are reported per task
    features: np.ndarray | None = None  # float32 or bfloat16 [length, width]; row t belongs to ids[t]

    def __post_init__(self):
        """Refuses arrays that do not belong together.

        Raises:
          ValueError: naming the sample.
        """
        for name, dtype in (("ids", np.int32), ("loss_mask", np.bool_)):
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 1:
                raise ValueError(
                    f"sample {self.id}: expected {name} {np.dtype(dtype)}[length], got {array.dtype}{list(array.shape)}"
                )
        if not self.ids.size or self.ids.shape != self.loss_mask.shape:
            raise ValueError(
                f"sample {self.id}: expected as many ids as mask values and at least one, "
                f"got {self.ids.size} and {self.loss_mask.size}"
            )
        if self.features is None:
            return
        if self.features.dtype not in FEATURE_TYPES or self.features.shape[:1] != self.ids.shape:
            raise ValueError(
                f"sample {self.id}: expected float32 or bfloat16 features of {self.ids.size} rows, "
                f"got {self.features.dtype}{list(self.features.shape)}"
            )
        if self.features.ndim != 2:
            raise ValueError(
                f"sample {self.id}: expected features [length, width], got {self.features.ndim} axes"
            )

    @property
    def content(self) -> str:
        """SHA-256 over ids and mask: equal for equal training text, with or without features."""
        ids, mask = self.ids.astype("<i4").tobytes(), self.loss_mask.astype(np.uint8).tobytes()
        return hashlib.sha256(ids + mask).hexdigest()  # the mask's length follows from the total


def encode(sample: Sample) -> bytes:
    """One record: safetensors with ids, loss_mask (uint8), features, and the rest as metadata.

    bfloat16 features are stored as their bits (uint16), which every reader of safetensors knows. Equal
    samples have equal records.
    """
    tensors = {"ids": sample.ids, "loss_mask": sample.loss_mask.astype(np.uint8)}
    about = {"id": sample.id, "task": sample.task, "content": sample.content}
    if sample.features is not None:
        bits = np.ascontiguousarray(sample.features)
        bits = bits.view(np.uint16) if bits.dtype == ml_dtypes.bfloat16 else bits
        tensors["features"] = bits
        about |= {"features": sample.features.dtype.name, "features_content": _sha256(bits)}
    # One entry: safetensors writes several in random order.
    return safetensors.numpy.save(tensors, {"sample": json.dumps(about, sort_keys=True)})


def decode(record: bytes) -> Sample:
    """The sample of a record, checked against the hashes in it.

    Raises:
      ValueError: the record is no sample, or was changed after it was written.
    """
    try:
        header_length = int.from_bytes(record[:8], "little")
        about = json.loads(json.loads(record[8 : 8 + header_length])["__metadata__"]["sample"])
        tensors = safetensors.numpy.load(record)
        features = tensors.get("features")
        if features is not None and about["features"] == "bfloat16":
            features = features.view(ml_dtypes.bfloat16)
        sample = Sample(
            id=about["id"],
            ids=tensors["ids"],
            loss_mask=tensors["loss_mask"].astype(np.bool_),
            task=about["task"],
            features=features,
        )
    except (KeyError, TypeError, ValueError, safetensors.SafetensorError) as problem:
        raise ValueError(
            f"record: expected a sample written by jspec, got {len(record)} bytes that are none ({problem}); "
            "prepare the folder again"
        ) from problem
    same = about["content"] == sample.content
    if not same or (features is not None and about["features_content"] != _sha256(tensors["features"])):
        raise ValueError(
            f"sample {sample.id}: expected the content it was written with, got other {'features' if same else 'ids'}; "
            "the file is damaged: prepare the folder again"
        )
    return sample


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
