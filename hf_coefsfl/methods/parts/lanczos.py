"""Leading eigenpairs of many small symmetric operators at once, by the Lanczos method."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def leading_eigenpairs(
    matvec: Callable[[Tensor], Tensor], start: Tensor, num_iterations: int, rank: int
) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues (b, rank) and unit eigenvectors (b, rank, d) of largest magnitude.

    `matvec` applies the operator of each sample to its row of (b, d); `start` (b, d) seeds the Krylov space. Each new
    direction is orthogonalised against all earlier ones. If the space is exhausted (the start lies in an invariant
    subspace) the remaining pairs are zero.
    """
    num_iterations = min(num_iterations, start.shape[1])
    q = torch.nn.functional.normalize(start, dim=1)  # in the dtype of `start`: no half precision, eigh has none
    basis, alphas, betas = [q], [], []
    for _ in range(num_iterations):
        w = matvec(basis[-1])
        alphas.append((w * basis[-1]).sum(1))
        scale = w.norm(dim=1)
        for _ in range(2):  # twice is enough to keep the basis orthogonal in floating point
            for direction in basis:
                w = w - (w * direction).sum(1, keepdim=True) * direction
        beta = w.norm(dim=1)
        alive = beta > 1e-5 * scale
        betas.append(torch.where(alive, beta, torch.zeros_like(beta)))
        basis.append(torch.where(alive[:, None], w / beta.clamp(min=1e-30)[:, None], torch.zeros_like(w)))
    off = torch.stack(betas[:-1], 1) if num_iterations > 1 else start.new_zeros(len(start), 0)
    tridiagonal = torch.diag_embed(torch.stack(alphas, 1)) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    values, vectors = torch.linalg.eigh(tridiagonal)
    order = values.abs().argsort(dim=1, descending=True)[:, :rank]
    values = values.gather(1, order)
    vectors = vectors.gather(2, order[:, None, :].expand(-1, num_iterations, -1))
    return values, torch.einsum("mbd,bmk->bkd", torch.stack(basis[:-1]), vectors)
