"""A policy as an ONNX model: raw observations in, distribution parameters and value out.

Inputs are the leaves of the observation space by their paths, [batch, *shape] in their own dtypes, as an
environment gives them: normaliser and encoders are in the model. Outputs are `parameters` [batch, P], those
of every action head behind one another, and `value` [batch]. Which part of `parameters` means what stands in
the model's metadata under `action`: path, kind, start and size. Needs the extra `onnx`.
"""

import copy
import json
import logging
import warnings
from collections.abc import Mapping
from typing import Any, Final

import onnx  # noqa: F401 - its absence is told here
import onnxscript  # noqa: F401
import torch
from torch import Tensor, nn

from penstock.policy.policy import Policy
from penstock.wire.spaces import leaves

PARAMETERS: Final = "parameters"
VALUE: Final = "value"
_EXAMPLE_ROWS: Final = 2


class Exported(nn.Module):
    """The forward pass with one argument per leaf."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = policy
        self._paths = input_names(policy)

    def forward(self, *observation: Tensor) -> tuple[Tensor, Tensor]:
        """Return parameters [M, P] and value [M] of leaves [M, *shape]."""
        rows = dict(zip(self._paths, observation, strict=True))
        outputs = self._policy.outputs(self._policy.read(rows))
        return outputs.parameters, outputs.value


def to_onnx(policy: Policy, metadata: Mapping[str, str]) -> bytes:
    """Return an ONNX model that computes the same as `policy` at this moment; `policy` is left unchanged.

    Action masks are not in it: the user of its `parameters` masks them. metadata: further entries of the
    model's metadata. Raises ValueError for a policy with state.
    """
    if policy.state_space.spaces:
        remembered = ", ".join(path for path, _ in leaves(policy.state_space, "state"))
        raise ValueError(
            f"a policy that remembers ({remembered}) has no ONNX form here: export it as safetensors, or set "
            "policy.recurrent='none' and policy.frame_stack=1"
        )
    module = Exported(copy.deepcopy(policy).cpu()).eval()
    example = tuple(
        torch.zeros((_EXAMPLE_ROWS, *leaf.shape), dtype=getattr(torch, leaf.dtype))
        for _, leaf in leaves(policy.observation_space, "observation")
    )
    batch = torch.export.Dim("batch")
    # It warns of packages that we do not use.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program: Any = torch.onnx.export(
            module,
            example,
            dynamo=True,
            verbose=False,
            input_names=input_names(policy),
            output_names=[PARAMETERS, VALUE],
            dynamic_shapes=(tuple({0: batch} for _ in example),),
        )
    model = program.model_proto
    for key, value in {**metadata, "action": json.dumps(_heads(policy))}.items():
        model.metadata_props.add(key=key, value=value)
    return bytes(model.SerializeToString())


def input_names(policy: Policy) -> list[str]:
    """Return the paths of the observation's leaves, in order."""
    return [path for path, _ in leaves(policy.observation_space, "observation")]


def _heads(policy: Policy) -> list[dict[str, Any]]:
    """Return the part of the parameters that belongs to each action head."""
    described, start = [], 0
    for head in policy.action_heads:
        described.append({"path": head.path, "kind": type(head).__name__, "start": start, "size": head.size})
        start += head.size
    return described
