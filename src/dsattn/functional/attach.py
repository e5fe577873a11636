"""A loss on the way of an output, for layers that can return only that."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from dsattn.errors import BadInput
from dsattn.functional.validation import check_number


def attach_loss(
    out: Float[Tensor, "*shape"], loss: Float[Tensor, ""], scale: float | Tensor = 1.0
) -> Float[Tensor, "*shape"]:
    """`out` as it is, whose backward also sends `scale` into `loss`.

    A layer that returns only its output trains its indexer so: whatever the outer loss is, the backward adds
    scale * d loss / d parameters. With a loss scaler, pass its factor as `scale`.

    Args:
        out: any differentiable tensor.
        loss: a scalar, e.g. of `indexer_loss`.
        scale: a number, or a tensor with one number; outside compiled graphs the tensor may still change before the
            backward runs.

    Returns:
        A tensor equal to `out`, a view of it: do not edit it in place.

    Raises:
        BadInput: `out` or `loss` is no tensor of floating-point numbers, `loss` is not a scalar, or `scale` no number.
    """
    for name, value in (("out", out), ("loss", loss)):
        if not isinstance(value, Tensor):
            raise BadInput(name, given=type(value).__name__, needed="a torch.Tensor")
        if not value.is_floating_point():
            raise BadInput(name, given=value.dtype, needed="a floating-point dtype")
    if loss.ndim:
        raise BadInput("loss", given=f"shape {list(loss.shape)}", needed="a scalar")
    if isinstance(scale, Tensor):
        if scale.numel() != 1 or scale.is_complex():
            raise BadInput("scale", given=f"{scale.dtype} of shape {list(scale.shape)}", needed="one real number")
    else:
        check_number("scale", scale)
    return _Attach.apply(out, loss, scale)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
        ctx.scale, ctx.like = scale, (loss.dtype, loss.device)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        dtype, device = ctx.like
        scale = torch.as_tensor(ctx.scale, dtype=dtype, device=device).reshape(())
        return d_outputs[0], scale, None
