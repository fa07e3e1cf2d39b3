"""A GPU that is only pretended: tensors on "cuda" with shapes, dtypes and nothing in them.

torch's FakeTensorMode runs every operator on such tensors without a card, refuses operands on two
devices, and refuses to say what a number is. Two things are added. A few calls from Python, x[...]
among them, ask for the card itself on a torch without CUDA: they are done by the operators that
they stand for. And tolist() and int(), the ways in which kvlab reads sampled ids, are answered
with zeros and counted; bool() and the rest stay refused.
"""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

GPU = torch.device("cuda", 0)


def indexed(x, index, put=None):
    """x[index], or x[index] = put."""
    index = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [each for each in index if not isinstance(each, torch.Tensor)]:
        at = next(i for i, each in enumerate(index) if each is Ellipsis)
        missing = x.dim() - sum(each is not None for each in index) + 1
        index[at : at + 1] = [slice(None)] * missing
    dim, tensors = 0, {}
    for each in index:
        if each is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif isinstance(each, slice):
            x, dim = torch.ops.aten.slice(x, dim, each.start, each.stop, each.step or 1), dim + 1
        elif isinstance(each, torch.Tensor):
            tensors[dim], dim = each, dim + 1
        else:
            x = x.select(dim, each)
    places = [tensors.get(i) for i in range(max(tensors, default=-1) + 1)]
    if put is None:
        return torch.ops.aten.index(x, places) if tensors else x
    put = put if isinstance(put, torch.Tensor) else x.new_full((), put)
    return torch.ops.aten.index_put_(x, places, put) if tensors else torch.ops.aten.copy_(x, put)


def made_of(data, dtype=None, device="cpu"):
    """torch.tensor(data): what is copied to the card is as wide, and empty like all else."""
    shape, leaf = [], data
    while isinstance(leaf, list | tuple):
        shape.append(len(leaf))
        leaf = leaf[0] if leaf else 0.0
    return torch.empty(shape, dtype=dtype or torch.tensor(leaf).dtype, device=device)


def zeros(shape):
    return [zeros(shape[1:]) for _ in range(shape[0])] if shape else 0


class PretendGpu(TorchFunctionMode):
    """`with PretendGpu() as card:` what is made inside is pretended; device="cuda" works.

    card.num_read_back   times that numbers were asked for
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=False)
        self.num_read_back = 0

        self.listed = patch.object(FakeTensor, "tolist", lambda x: self._tolist(x))

    def _tolist(self, x):
        self.num_read_back += 1
        return zeros(x.shape)

    def __enter__(self):
        self.fake.__enter__()
        self.listed.start()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.listed.stop()
        return self.fake.__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            return indexed(*args)
        if function is torch.Tensor.new_tensor:
            return made_of(args[1], device=args[0].device)
        if function is torch.tensor:
            return made_of(*args, **(kwargs or {}))
        if function is torch.Tensor.copy_:
            return torch.ops.aten.copy_(*args)
        if function is torch.Tensor.__int__:
            self.num_read_back += 1
            return 0
        return function(*args, **(kwargs or {}))


def on_the_gpu(weights):
    """Weights of the same shapes and dtypes on the pretended card."""
    return {name: torch.empty(w.shape, dtype=w.dtype, device=GPU) for name, w in weights.items()}
