"""The products of a decoder's layer for one token on a CPU: the same numbers in fewer reads.

    model = Decoder(spec, weights, products_for(device))      # what kvlab.checkpoint.load() does

A step of one token reads every weight once and does little else, so what counts is how the
weights lie and how often a call starts. Three things are done differently than on paper, and
chapter 8 measures each: one token is a vector, so a product is a torch.mv; matrices are stored
along their longer side; the norm's factor and the residual ride along in the product. The choice
is made once, when the decoder is made. Equality with the plain products is a test.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvlab.model import Products, rms_norm


def products_for(device: torch.device | str) -> Products:
    """What a decoder decodes fastest with on this device."""
    return FastProducts() if torch.device(device).type == "cpu" else Products()


class FastProducts(Products):
    """Products whose one-token rows are vectors [d]."""

    def lay_out(self, weight: torch.Tensor) -> torch.Tensor:
        """The same matrix [out, in], stored so that the longer side is contiguous in memory.

        A matrix-vector product reads every weight once, and long unbroken runs read fastest. A
        few unused numbers end each run: runs that start whole pages apart would all fall on the
        same few lines of the processor's cache, and push each other out when several rows are
        multiplied.
        """
        if weight.dtype == torch.float32 and weight.shape[0] >= weight.shape[1]:
            num_out, num_in = weight.shape
            runs = weight.new_empty(num_in, num_out + 16)[:, :num_out]
            return runs.copy_(weight.t()).t()
        return weight.contiguous()

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """[1, d] becomes [d]."""
        return x[0] if x.shape[:-1] == (1,) else x

    def norm_project(
        self, weight: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """weight times rms_norm(x); the norm's factor rides along in the product where it can."""
        if x.dim() > 1:
            return F.linear(rms_norm(x, norm, eps), weight)
        if x.dtype == torch.bfloat16:  # the norm's result is rounded, as transformers rounds it
            return torch.mv(weight, x.mul(rms_scale(x, eps)).mul_(norm))
        # beta=0: the first argument only has the right shape, its content is not read
        return torch.addmv(weight[:, 0], weight, x * norm, beta=0, alpha=rms_scale(x, eps))

    def add_project(
        self, residual: torch.Tensor, weight: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """residual + weight times x, in one call where that is not slower."""
        if x.dim() > 1:
            return residual + F.linear(x, weight)
        if x.dtype == torch.float32:
            return torch.addmv(residual, weight, x)
        return residual + torch.mv(weight, x)


def rms_scale(x: torch.Tensor, eps: float) -> float:
    """1 / sqrt(mean(x^2) + eps) of one vector: the sum of squares is one dot product."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (float(torch.dot(wide, wide)) / x.shape[0] + eps) ** -0.5
