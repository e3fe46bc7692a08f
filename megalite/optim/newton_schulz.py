"""Orthogonalisation by Newton-Schulz polynomials, as Muon needs it (Jordan 2024; Bernstein 2024).

Each polynomial maps the singular values s of a matrix to a s + b s^3 + c s^5. A table takes those in (0, 1] that are
not tiny towards 1: `jordan` leaves them between 0.68 and 1.13, `quintic` between 0.98 and 1.03, `polar_express` (arXiv
2505.16932, its factor of 1.01 included) and `deepseek_v4` within 0.1 %. A value of 0 stays 0, and rounding noise beside
it grows by the product of the a's: 485 with `jordan`, 79,263 with `deepseek_v4`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.kernels.products import statistics_dtype

Polynomial = tuple[float, float, float]
JORDAN = (3.4445, -4.7750, 2.0315)
TABLES: dict[str, tuple[Polynomial, ...]] = {
    "jordan": (JORDAN,) * 5,
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.25, 0.375),
    ),
    "deepseek_v4": (*(JORDAN,) * 8, *((2.0, -1.5, 0.5),) * 2),
}
LEAST_NORM = 1e-15  # below it a matrix counts as 0: gradients are divided by all tokens of a step, and far above


def polynomials(name: str, steps: int | None) -> tuple[Polynomial, ...]:
    """The first `steps` polynomials of a table, the last one repeated beyond its end; None: the table."""
    table = TABLES[name]
    return table if steps is None else tuple(table[min(at, len(table) - 1)] for at in range(steps))


def orthogonalised(x: Tensor, table: Sequence[Polynomial]) -> Tensor:
    """x, [r, c] or [n, r, c], with singular values moved towards 1 as the table says, in the dtype of x."""
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=statistics_dtype(x.dtype))
    x = x / norm.clamp(min=LEAST_NORM).to(x.dtype)
    tall, add = x.shape[-2] > x.shape[-1], torch.addmm if x.dim() == 2 else torch.baddbmm
    x = x.mT if tall else x
    for a, b, c in table:
        gram = x @ x.mT  # of the smaller side
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
