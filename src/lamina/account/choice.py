"""What one call of the exponential mechanism costs, as an event that every accountant knows.

A mechanism is ε-bounded-range if, for neighbouring data, its log-likelihood ratios over all outputs lie in some
interval [t-ε, t]. Choosing with p ∝ exp(ε·u) is, if one contribution moves every u by at most 1 and with one sign.

Claim. It is dominated by one Gaussian release with multiplier 1/μ,   μ = 2Φ⁻¹(1/(1+e^(-ε/2))).

Among all mechanisms with ratios in [t-ε, t], the most revealing has two outputs, with ratios t and t-ε. Telling
N(μ,1) from N(0,1) by a threshold c has the log-odds logit Φ(μ-c) and logit Φ(-c), which differ by at least
2·logit Φ(μ/2) = ε: the slope of logit∘Φ is least at 0, so the difference is least for c = μ/2. So some threshold,
coarsened by a coin, gives exactly the two-output mechanism: it is a post-processing of the Gaussian release. Both
may then be sampled with the same coins: choosing on a Poisson sample of rate q is dominated by the subsampled
Gaussian of rate q, and any accountant that prices that one prices the choice. (μ ≈ 0.627ε; the zCDP of a choice is
ε²/8 = 0.125ε², that of the Gaussian 0.196ε²: what being one kind of event with the steps costs.)
"""

from __future__ import annotations

import math

from scipy import special

from lamina.errors import AccountingError


def choice_multiplier(epsilon: float) -> float:
    """The noise multiplier 1/μ of the Gaussian that dominates an ε-bounded-range choice; rounded down.

    ε ≥ 1e-6: with less a choice is a toss-up, and its price is below what floating point tells from nothing.

    >>> round(choice_multiplier(0.5), 4)
    3.1951
    """
    if not isinstance(epsilon, int | float) or isinstance(epsilon, bool) or not 1e-6 <= epsilon <= 50:
        told = repr(epsilon) if not isinstance(epsilon, int) or abs(epsilon) < 10**20 else "a huge number"
        raise AccountingError(
            "account.epsilon-choice-lie", f"epsilon of a choice is {told}, must lie in [1e-6, 50]", "e.g. 0.5"
        )
    if epsilon < 1:  # 1/(1+e^(-ε/2)) is near ½ there, which is where its digits are: 2p - 1 = tanh(ε/4)
        mu = 2.0 * math.sqrt(2.0) * float(special.erfinv(math.tanh(0.25 * epsilon)))
    else:
        mu = -2.0 * float(special.ndtri(special.expit(-0.5 * epsilon)))
    return 1.0 / (mu * (1 + 1e-12))
