"""Whether a fragment follows the run's schema; every failure names field, value and remedy."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np

from penstock.protocol.fragment import (
    LZ4,
    RAW,
    Fragment,
    FragmentHeader,
    TensorEntry,
    check_frame,
    read_entry,
)
from penstock.protocol.limits import (
    MAX_ATTRIBUTES_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_NAME_LENGTH,
    MAX_NUMBER,
    MAX_SLOTS,
    MAX_STEPS,
    MAX_TENSORS,
    check_policy,
)
from penstock.protocol.schema import Axes, FragmentSchema, TensorRule
from penstock.protocol.tensor import DTYPES, Array, check_shape, check_truth

MOST = float(np.finfo(np.float32).max)
UNBOUNDED = MappingProxyType({"reward": MOST, "log_prob": MOST})
"""Largest absolute values where a run does not say: what is finite."""
TRUTH_TENSORS = ("terminated", "truncated", "valid")


def check(
    fragment: Fragment, schema: FragmentSchema, run: str, bounds: Mapping[str, float] = UNBOUNDED
) -> None:
    """Raise ValueError that names field, value and remedy unless a fragment of `run` follows the schema."""
    check_header(fragment.header, schema, run)
    check_table(fragment.header, len(fragment.payload), schema)
    check_content(fragment.header, fragment.payload, bounds)


def check_header(header: FragmentHeader, schema: FragmentSchema, run: str) -> None:
    if header.run != run:
        raise ValueError(f"header.run={header.run[:80]!r}: this broker serves {run!r}")
    check_policy("header.policy", header.policy)
    if header.schema_id != schema.schema_id:
        raise ValueError(f"header.schema_id={header.schema_id[:12]}…: the run's is {schema.schema_id[:12]}…")
    if header.session < 1 or header.sequence < 1:
        raise ValueError(f"header.session={header.session}, sequence={header.sequence}: both start at 1")
    if not 1 <= header.steps <= MAX_STEPS or not 1 <= len(header.slots) <= MAX_SLOTS:
        raise ValueError(
            f"header: T={header.steps} and N={len(header.slots)} must be 1..{MAX_STEPS} and 1..{MAX_SLOTS}"
        )
    if len(header.attributes) > MAX_ATTRIBUTES_BYTES:
        raise ValueError(f"header.attributes: {len(header.attributes)} bytes, {MAX_ATTRIBUTES_BYTES} allowed")
    if len(header.group_id) > MAX_NAME_LENGTH:
        raise ValueError(f"header.group_id: {len(header.group_id)} characters, {MAX_NAME_LENGTH} allowed")
    for slot in header.slots:
        if max(slot.episode_id, slot.first_step) > MAX_NUMBER:
            raise ValueError(f"header.slots: {slot} counts beyond 2^53")
    _check_weights(header)


def _check_weights(header: FragmentHeader) -> None:
    most = min(MAX_SLOTS, header.charge)
    if not 1 <= len(header.weights) <= most:
        raise ValueError(f"header.weights: {len(header.weights)} spans, give 1 to {most}")
    for span in header.weights:
        fits = span.length >= 1 and span.start + span.length <= header.steps and span.slot < len(header.slots)
        if not 1 <= span.version <= MAX_NUMBER or span.update > MAX_NUMBER or not fits:
            raise ValueError(
                f"header.weights: span {span} does not fit T={header.steps}, N={len(header.slots)} "
                "or names no version"
            )


def check_table(header: FragmentHeader, payload_size: int, schema: FragmentSchema) -> None:
    """Raise ValueError unless the table holds the schema's tensors, packed without holes."""
    _check_table(header.tensors, header.steps, len(header.slots), payload_size, schema)


@lru_cache(maxsize=1024)
def _check_table(
    table: tuple[TensorEntry, ...], steps: int, slots: int, payload_size: int, schema: FragmentSchema
) -> None:
    _check_names([entry.name for entry in table], schema)
    offset = decoded = 0
    ends: int | None = None
    for entry in table:
        rule = schema.by_name.get(entry.name) or schema.optional[entry.name]
        if rule.axes is Axes.END:
            ends = _count_ends(entry, ends)
        _check_entry(entry, rule, (*rule.axes.leading(steps, slots, ends or 0), *rule.shape))
        if entry.offset != offset:
            raise ValueError(f"{entry.name}: offset {entry.offset}, {offset} expected")
        offset += entry.stored_size
        decoded += entry.raw_size
    if decoded > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"payload: decodes to {decoded} bytes, {MAX_MESSAGE_BYTES} allowed; send fewer steps"
        )
    if offset != payload_size:
        raise ValueError(f"payload: {payload_size} bytes, the table describes {offset}")
    if ends is not None and ends > steps * slots:
        raise ValueError(f"final: {ends} ended episodes in {steps * slots} steps")


def _check_names(names: Sequence[str], schema: FragmentSchema) -> None:
    wanted, given = schema.by_name.keys(), set(names)
    known = wanted | schema.optional.keys()
    if len(names) == len(given) <= MAX_TENSORS and wanted <= given <= known:
        return
    missing, foreign = sorted(wanted - given), sorted(given - known)
    raise ValueError(
        f"tensors: {len(names)} rows, missing {missing[:4]}, not in the schema "
        f"{[n[:80] for n in foreign[:4]]}; give each tensor of the schema once"
    )


def _count_ends(entry: TensorEntry, ends: int | None) -> int:
    if ends is not None:
        return ends
    if not entry.shape:
        raise ValueError(f"{entry.name}: shape (), one row per ended episode expected")
    return entry.shape[0]


def _check_entry(entry: TensorEntry, rule: TensorRule, shape: tuple[int, ...]) -> None:
    if entry.dtype != rule.dtype:
        raise ValueError(f"{entry.name}: dtype {entry.dtype[:32]}, the schema says {rule.dtype}")
    if entry.shape != shape:
        # `check_shape` first: an absurd rank must not be printed in full.
        raise ValueError(
            f"{entry.name}: shape {check_shape(entry.name, entry.shape)}, the schema says {shape}"
        )
    raw = math.prod(shape) * DTYPES[rule.dtype].itemsize
    if entry.raw_size != raw or raw > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"{entry.name}: raw_size {entry.raw_size}, {raw} expected and {MAX_MESSAGE_BYTES} allowed"
        )
    if entry.codec == RAW and entry.stored_size != raw:
        raise ValueError(f"{entry.name}: stored_size {entry.stored_size}, {raw} expected")
    if entry.codec not in (RAW, LZ4):
        raise ValueError(f"{entry.name}: codec {entry.codec[:16]!r} is not one of {RAW}, {LZ4}")


def check_content(
    header: FragmentHeader, payload: bytes | memoryview, bounds: Mapping[str, float] = UNBOUNDED
) -> None:
    """Raise ValueError for bad numbers, truth values and frames of a payload; call after `check_table`."""
    for entry in header.tensors:
        if entry.name in bounds:
            _check_bound(entry.name, _numbers(entry, payload), bounds[entry.name])
        elif entry.name in TRUTH_TENSORS:
            if entry.codec == RAW:
                check_truth(entry.name, payload, entry.offset, entry.raw_size)
            else:
                read_entry(entry, payload)
        elif entry.codec == LZ4:
            check_frame(entry, payload)


def _check_bound(name: str, numbers: Any, bound: float) -> None:
    largest = np.abs(numbers).max()
    # NaN is in no order, so it is not below the bound either.
    if largest <= bound:
        return
    if not np.isfinite(largest):
        raise ValueError(f"{name}: holds NaN or infinity; send finite numbers")
    raise ValueError(
        f"{name}: holds ±{largest:g}, and broker.max_{name}={bound:g}; where that is what the environment or "
        "the policy gives, raise it"
    )


def _numbers(entry: TensorEntry, payload: bytes | memoryview) -> Array:
    if entry.codec != RAW:
        return read_entry(entry, payload)
    kind = DTYPES[entry.dtype]
    return np.frombuffer(payload, kind, entry.raw_size // kind.itemsize, entry.offset)
