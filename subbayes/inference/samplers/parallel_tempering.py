r"""Parallel tempering (Geyer 1991) over elliptical slice moves, vectorised over ladders and rungs.

Each chain is a ladder of R densities between posterior and prior,

$$ \pi_r(z) \propto L(z)^{\beta_r / T}\, p(z), \qquad 1 = \beta_0 > \dots > \beta_{R-1} = 0, $$

which move side by side and exchange their points: rungs r and r + 1 with probability
$\min\{1, \exp[(\beta_r - \beta_{r+1})(\ell_{r+1} - \ell_r) / T]\}$, even pairs in even rounds and
odd pairs in odd ones, by turns and not at random, so that points travel up and down the ladder
instead of diffusing (Okabe et al. 2001; Syed et al. 2022). The draws are those of the rung
$\beta_0 = 1$.

**What the exchange costs.** A round is a fixed number of moves, whatever they cost: a move ended
for want of time would favour points from which moves are short. So an exchange must wait until
*both* its rungs have done theirs. No rung waits for any other, no ladder for another ladder, and
hot rungs, whose moves are cheap, make more of them in a round. The share of evaluations spent on
rungs that wait is in the statistic "idle", about a third.

Geyer (1991), *Markov chain Monte Carlo maximum likelihood*; Syed, Bouchard-Côté, Deligiannidis &
Doucet (2022), *Non-reversible parallel tempering*, algorithms 1 and 4; Meng & Wong (1996), bridge
sampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.samplers import elliptical_slice
from subbayes.inference.samplers.adaptation import Schedule
from subbayes.inference.samplers.chains import Density, Info, Rngs, Sampler
from subbayes.inference.samplers.random_numbers import copy_state, refill, select_chains
from subbayes.utils.checks import check_count

__all__ = ["Kernel", "ParallelTempering", "State"]

_AHEAD = 32
_SPACING = 5.0  # of the first ladder: beta_r = (1 - r / (R - 1))^5
_MOST_MOVES = 20
_NOWHERE, _COLD, _HOT = 0, 1, 2
_SEARCH = (
    "direction",
    "threshold",
    "angle",
    "low",
    "high",
    "evaluations",
    "uniforms",
    "normals",
    "n_uniforms",
    "n_normals",
)


@dataclass(frozen=True)
class State:
    """Every rung's point and the ellipse it is searching, and what is known of the ladder.

    Attributes:
        z: point of the cold rung, shape (chains, k).
        points: of all rungs, the cold one first, shape (chains, rungs, k).
        log_likelihood: theirs at temperature 1, shape (chains, rungs).
        direction: of the ellipse of each rung, shape (chains, rungs, k).
        threshold: log height of its slice, shape (chains, rungs).
        angle: angle to try next, shape (chains, rungs).
        low: lower end of the bracket of angles, shape (chains, rungs).
        high: upper end of the bracket, shape (chains, rungs).
        evaluations: spent on the move under way, shape (chains, rungs).
        uniforms: drawn ahead, shape (chains, rungs, ahead).
        normals: drawn ahead, shape (chains, rungs, ahead, k).
        n_uniforms: how many are used, shape (chains, rungs).
        n_normals: how many are used, shape (chains, rungs).
        beta: powers of the likelihood, shape (chains, rungs).
        moves: moves of each rung in a round, shape (chains, rungs).
        left: moves left in this round; 0 waits, shape (chains, rungs).
        round: rounds done, shape (chains, rungs).
        coins: uniforms for exchanges, drawn ahead, shape (chains, ahead, rungs - 1).
        n_coins: how many rows of them are used, shape (chains,).
        count: rounds of the cold rung, shape (chains,).
        steps: batched evaluations since its last one, shape (chains,).
        spent: evaluations by rungs at work, shape (chains, rungs).
        made: moves made, shape (chains, rungs).
        idle: evaluations of rungs that waited, shape (chains,).
        tried: exchanges tried, shape (chains, rungs - 1).
        refused: sum of their probabilities of refusal, shape (chains, rungs - 1).
        up: log sum of exp(gap / 2) over the upper rung's draws, shape (chains, rungs - 1).
        down: log sum of exp(-gap / 2) over the lower rung's, shape (chains, rungs - 1).
        noted: draws of each rung in these sums, shape (chains, rungs).
        origin: the end of the ladder a point was at last, 1 cold, 2 hot, shape (chains, rungs).
        trips: journeys of points from the prior to the posterior, shape (chains,).
    """

    z: Float[np.ndarray, "chains k"]
    points: Float[np.ndarray, "chains rungs k"]
    log_likelihood: Float[np.ndarray, "chains rungs"]
    direction: Float[np.ndarray, "chains rungs k"]
    threshold: Float[np.ndarray, "chains rungs"]
    angle: Float[np.ndarray, "chains rungs"]
    low: Float[np.ndarray, "chains rungs"]
    high: Float[np.ndarray, "chains rungs"]
    evaluations: Int[np.ndarray, "chains rungs"]
    uniforms: Float[np.ndarray, "chains rungs ahead"]
    normals: Float[np.ndarray, "chains rungs ahead_normals k"]
    n_uniforms: Int[np.ndarray, "chains rungs"]
    n_normals: Int[np.ndarray, "chains rungs"]
    beta: Float[np.ndarray, "chains rungs"]
    moves: Int[np.ndarray, "chains rungs"]
    left: Int[np.ndarray, "chains rungs"]
    round: Int[np.ndarray, "chains rungs"]
    coins: Float[np.ndarray, "chains ahead_coins gaps"]
    n_coins: Int[np.ndarray, "chains"]
    count: Int[np.ndarray, "chains"]
    steps: Int[np.ndarray, "chains"]
    spent: Int[np.ndarray, "chains rungs"]
    made: Int[np.ndarray, "chains rungs"]
    idle: Int[np.ndarray, "chains"]
    tried: Float[np.ndarray, "chains gaps"]
    refused: Float[np.ndarray, "chains gaps"]
    up: Float[np.ndarray, "chains gaps"]
    down: Float[np.ndarray, "chains gaps"]
    noted: Int[np.ndarray, "chains rungs"]
    origin: Int[np.ndarray, "chains rungs"]
    trips: Int[np.ndarray, "chains"]


@dataclass
class _Powers:
    """The densities of all rungs in a row: the likelihood to the power of each under one prior."""

    posterior: Density
    power: Float[np.ndarray, "rows"]
    temperature: float = 1.0

    def __post_init__(self) -> None:
        self.rank, self.prior = self.posterior.rank, self.posterior.prior
        self.raw: Float[np.ndarray, "rows"] = np.zeros(0)

    def fingerprint(self) -> str:
        return self.posterior.fingerprint()

    def log_likelihood(self, z: Float[np.ndarray, "rows k"]) -> Float[np.ndarray, "rows"]:
        raw = self.posterior.log_likelihood(z)
        self.raw = np.where(np.isnan(raw), -np.inf, raw)
        return _temper(self.power, self.raw)


def _temper(power: np.ndarray, raw: np.ndarray) -> np.ndarray:
    """beta l, and 0 on the prior's rung even where l is minus infinity."""
    return np.multiply(power, raw, where=power > 0, out=np.zeros_like(raw))


@dataclass(frozen=True)
class Kernel:
    """The transition: `init` and `step` on a posterior with a Gaussian prior.

    Attributes:
        warmup: draws per ladder in which powers and moves per round adapt.
        rungs: densities in a ladder, posterior and prior included.
    """

    warmup: int
    rungs: int

    name = "parallel-tempering"
    state_type = State

    def init(self, posterior: Density, z: Float[np.ndarray, "chains k"], rngs: Rngs) -> State:
        """The state at start points z, all rungs of a ladder at the same one."""
        (chains, k), rungs = z.shape, self.rungs
        beta = np.tile((1 - np.arange(rungs) / (rungs - 1)) ** _SPACING, (chains, 1))
        powers = _Powers(posterior, beta.reshape(-1) / posterior.temperature)
        flat = elliptical_slice.Kernel().init(
            powers, np.repeat(z, rungs, 0), _repeat_generators(rngs, rungs)
        )
        none, blank = np.zeros((chains, rungs), dtype=np.int64), np.zeros((chains, rungs - 1))
        origin = none.copy()
        origin[:, 0], origin[:, -1] = _COLD, _HOT
        one = np.zeros(chains, dtype=np.int64)
        return copy_state(
            State(
                z=z,
                points=flat.z.reshape(chains, rungs, k),
                log_likelihood=powers.raw.reshape(chains, rungs),
                **{name: _ladders(getattr(flat, name), rungs) for name in _SEARCH},
                beta=beta,
                moves=none + 1,
                left=none + 1,
                round=none,
                coins=np.zeros((chains, _AHEAD, rungs - 1)),
                n_coins=one + _AHEAD,
                count=one,
                steps=one,
                spent=none,
                made=none,
                idle=one,
                tried=blank,
                refused=blank,
                up=blank - np.inf,
                down=blank - np.inf,
                noted=none,
                origin=origin,
                trips=one,
            )
        )

    def step(self, posterior: Density, state: State, rngs: Rngs) -> tuple[State, Info]:
        """Try one angle on every rung of every ladder."""
        s = copy_state(state)
        powers = _Powers(posterior, s.beta.reshape(-1) / posterior.temperature)
        at_work = s.left > 0
        accepted = _try_angles(s, powers, at_work, rngs)
        s.left[accepted] -= 1
        s.steps[:] += 1
        s.spent[:] += at_work
        s.made[:] += accepted
        s.idle[:] += (~at_work).sum(1)
        advanced = self._exchange(posterior, s, rngs)
        finished = advanced[:, 0]
        s.z[finished] = s.points[finished, 0]
        s.count[:] += finished
        info = Info(finished, _stats(s) if finished.any() else {})
        s.steps[finished] = 0
        self._adapt(posterior, s, finished, rngs)
        return s, info

    def _exchange(
        self, posterior: Density, s: State, rngs: Rngs
    ) -> Bool[np.ndarray, "chains rungs"]:
        """Exchange points where both rungs of a pair are done; which rungs begin a new round."""
        ready = s.left == 0
        rung = np.arange(self.rungs)
        lower = (rung + s.round) % 2 == 0  # of its pair in this round
        pair = ready[:, :-1] & ready[:, 1:] & lower[:, :-1] & (s.round[:, :-1] == s.round[:, 1:])
        alone = ready & ((lower & (rung == self.rungs - 1)) | (~lower & (rung == 0)))
        advanced = alone.copy()
        advanced[:, :-1] |= pair
        advanced[:, 1:] |= pair
        if pair.any():
            self._accept_exchanges(posterior, s, pair, rngs)
        if advanced.any():
            s.round[advanced] += 1
            s.left[advanced] = s.moves[advanced]
            if (s.count >= self.warmup).any():
                _update_bridges(posterior, s, advanced & (s.count >= self.warmup)[:, None])
        return advanced

    def _accept_exchanges(
        self, posterior: Density, s: State, pair: Bool[np.ndarray, "chains gaps"], rngs: Rngs
    ) -> None:
        """Accept or refuse the exchanges of `pair`."""
        rows = np.flatnonzero(pair.any(1))  # others draw nothing: their streams are their own
        coins, used = refill(
            s.coins[rows],
            s.n_coins[rows],
            _AHEAD,
            lambda rng, shape: rng.random(shape),
            [rngs[c] for c in rows],
        )
        s.coins[rows], s.n_coins[rows] = coins, used + 1
        u = np.ones(pair.shape)
        u[rows] = coins[np.arange(len(rows)), used]
        # On the prior's rung l may be minus infinity: the other is finite, and the answer is no.
        gap = (s.beta[:, :-1] - s.beta[:, 1:]) / posterior.temperature
        with np.errstate(over="ignore", invalid="ignore"):
            log_ratio = gap * (s.log_likelihood[:, 1:] - s.log_likelihood[:, :-1])
            chance = np.exp(np.minimum(log_ratio, 0.0))
        s.tried[:] += pair
        s.refused[:] += np.where(pair, 1 - chance, 0.0)
        c, r = np.nonzero(pair & (u < chance))
        before = _temper(s.beta / posterior.temperature, s.log_likelihood)
        for array in (s.points, s.log_likelihood, s.origin):
            array[c, r], array[c, r + 1] = array[c, r + 1], array[c, r].copy()
        # The next move's height is relative to the point it begins at.
        s.threshold[:] += _temper(s.beta / posterior.temperature, s.log_likelihood) - before
        s.trips[:] += s.origin[:, 0] == _HOT
        s.origin[:, 0], s.origin[:, -1] = _COLD, _HOT

    def _adapt(
        self, posterior: Density, s: State, finished: Bool[np.ndarray, "chains"], rngs: Rngs
    ) -> None:
        """At the end of a window, powers of equal exchange rates; then begin the ladder's moves."""
        ends = [*Schedule.of(self.warmup).ends, self.warmup]
        rows = np.flatnonzero(finished & np.isin(s.count, ends))
        if not rows.size:
            return
        for c in rows:
            if s.count[c] < self.warmup:
                s.beta[c] = _equal_rates(s.beta[c], s.refused[c] / np.maximum(s.tried[c], 1))
            cost = s.spent[c] / np.maximum(s.made[c], 1)
            s.moves[c] = np.clip(np.rint(cost.max() / np.maximum(cost, 1)), 1, _MOST_MOVES)
            s.left[c] = s.moves[c]
            s.round[c] = s.round[c, 0]
        for counter in (s.spent, s.made, s.idle, s.tried, s.refused, s.trips):
            counter[rows] = 0
        _restart_moves(posterior, s, rows, rngs)


def _repeat_generators(rngs: Rngs, rungs: int) -> Rngs:
    """A ladder's generator for each of its rungs."""
    return [rng for rng in rngs for _ in range(rungs)]


def _ladders(rows: np.ndarray, rungs: int) -> np.ndarray:
    """Rows of all rungs, as (chains, rungs, ...)."""
    return rows.reshape(-1, rungs, *rows.shape[1:])


def _flat(s: State, powers: _Powers) -> elliptical_slice.State:
    """All rungs in a row, as elliptical slice sampling takes them."""

    def rows(array: np.ndarray) -> np.ndarray:
        return array.reshape(-1, *array.shape[2:])

    return elliptical_slice.State(
        z=rows(s.points),
        log_likelihood=_temper(powers.power, rows(s.log_likelihood)),
        **{name: rows(getattr(s, name)) for name in _SEARCH},
    )


def _restart_moves(posterior: Density, s: State, rows: Int[np.ndarray, "c"], rngs: Rngs) -> None:
    """New ellipses and heights for all rungs of some ladders, whose powers have changed."""
    part = State(**{name: array[rows] for name, array in vars(s).items()})
    powers = _Powers(posterior, part.beta.reshape(-1) / posterior.temperature)
    fresh = np.ones(part.beta.size, dtype=bool)
    moved = elliptical_slice.next_angles(
        powers,
        _flat(part, powers),
        fresh,
        _repeat_generators([rngs[c] for c in rows], s.beta.shape[1]),
    )
    _put(part, moved)
    for name in _SEARCH:
        getattr(s, name)[rows] = getattr(part, name)


def _put(s: State, flat: elliptical_slice.State) -> None:
    """The searches of all rungs back into their ladders."""
    for name in _SEARCH:
        getattr(s, name)[:] = _ladders(getattr(flat, name), s.beta.shape[1])


def _try_angles(
    s: State, powers: _Powers, at_work: Bool[np.ndarray, "chains rungs"], rngs: Rngs
) -> Bool[np.ndarray, "chains rungs"]:
    """One evaluation of every rung; which of those at work have made a move."""
    flat = _flat(s, powers)
    moved, info = elliptical_slice.Kernel().step(
        powers, flat, _repeat_generators(rngs, at_work.shape[1])
    )
    kept = select_chains(at_work.reshape(-1), moved, flat)
    accepted = info.finished.reshape(at_work.shape) & at_work
    _put(s, kept)
    s.points[:] = _ladders(kept.z, at_work.shape[1])
    s.log_likelihood[accepted] = powers.raw.reshape(at_work.shape)[accepted]
    return accepted


def _update_bridges(posterior: Density, s: State, rungs: Bool[np.ndarray, "chains rungs"]) -> None:
    """Add these rungs' points to the sums of the bridges to their neighbours."""
    half = 0.5 * (s.beta[:, :-1] - s.beta[:, 1:]) / posterior.temperature
    s.up[:] = np.where(rungs[:, 1:], np.logaddexp(s.up, half * s.log_likelihood[:, 1:]), s.up)
    with np.errstate(over="ignore"):
        s.down[:] = np.where(
            rungs[:, :-1], np.logaddexp(s.down, -half * s.log_likelihood[:, :-1]), s.down
        )
    s.noted[:] += rungs


def _stats(s: State) -> dict[str, np.ndarray]:
    """What is noted of a draw; rates and evidence are those of the ladder's run so far."""
    refused = s.refused / np.maximum(s.tried, 1)
    n = np.log(np.maximum(s.noted, 1))
    with np.errstate(invalid="ignore"):  # nothing noted yet
        bridges = (s.up - n[:, 1:]) - (s.down - n[:, :-1])
    return {
        "log_likelihood": s.log_likelihood[:, 0].copy(),
        "evaluations": s.steps * s.beta.shape[1],
        "swap_rate": 1 - refused.mean(1),
        "least_swap_rate": 1 - refused.max(1),
        "barrier": refused.sum(1),
        "round_trips": s.trips.copy(),
        "idle": s.idle / np.maximum(s.idle + s.spent.sum(1), 1),
        "log_evidence": np.where((s.noted > 0).all(1), bridges.sum(1), np.nan),
    }


def _equal_rates(
    beta: Float[np.ndarray, "rungs"], refused: Float[np.ndarray, "gaps"]
) -> Float[np.ndarray, "rungs"]:
    """Powers between which exchanges are refused equally often (Syed et al. 2022, algorithm 4).

    Refusals add up along the ladder; the sum is interpolated, on a scale on which the first ladder
    is even, and cut into equal parts.
    """
    sums = np.concatenate([[0.0], np.cumsum(refused + 0.01)])
    even = np.linspace(0, sums[-1], len(beta))
    new = np.interp(even, sums, beta ** (1 / _SPACING)) ** _SPACING
    new[0], new[-1] = 1.0, 0.0
    return new


@dataclass(frozen=True)
class ParallelTempering(Sampler):
    r"""Parallel tempering: samples a posterior with all its modes and estimates its evidence.

    The prior has to be Gaussian. A chain is a ladder, and an evaluation is of chains x rungs
    points; draws are those of the cold rung. The warm-up is half of the draws kept by default, at
    least 200.

    The draws have the stats "log_likelihood" (at temperature 1) and "evaluations" (of all rungs),
    and of the run so far "swap_rate", "least_swap_rate" (of any pair), "round_trips", "barrier"
    (sum of refusals, $\Lambda$), "idle" and "log_evidence"; meta has their final values. The log
    evidence of the tempered posterior is estimated by bridge sampling between neighbouring rungs;
    its standard error needs several ladders.

    Attributes:
        rungs: densities in a ladder, posterior and prior included; about twice the barrier is
            best.

    Raises:
        InputError: start points of zero density, or a checkpoint of another run.

    Example:
        >>> import subbayes, torch
        >>> from subbayes.likelihoods import Gaussian
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, Gaussian(noise=1.0), data, space)
        >>> engine = ParallelTempering(rungs=4)
        >>> engine.sample(posterior, draws=50, chains=2, warmup=50, progress=False).z.shape
        (2, 50, 2)
    """

    name = "parallel-tempering"
    rungs: int = 12

    def __post_init__(self) -> None:
        check_count("rungs", self.rungs, 2)

    def default_warmup(self, sampling: Sampling) -> int:
        """Half of the draws kept, at least 200."""
        return max(sampling.draws * sampling.thin // 2, 200)

    def kernel(self, posterior: Density, warmup: int) -> Kernel:
        """The transition, which adapts in the warm-up."""
        return Kernel(warmup, self.rungs)

    def run(self, posterior: Density, sampling: Sampling) -> Draws:
        """Draw from a posterior; see `Engine.run`."""
        draws = super().run(posterior, sampling)
        last = {name: values[:, -1] for name, values in draws.stats.items()}
        evidence, error = last["log_evidence"], math.nan
        if sampling.chains > 1:
            error = float(evidence.std(ddof=1) / np.sqrt(sampling.chains))
        return replace(
            draws,
            meta=draws.meta
            | {
                "swap_rate": float(last["swap_rate"].mean()),
                "least_swap_rate": float(last["least_swap_rate"].min()),
                "barrier": float(last["barrier"].mean()),
                "idle": float(last["idle"].mean()),
                "round_trips": int(last["round_trips"].sum()),
            },
            log_evidence=float(evidence.mean()),
            log_evidence_error=error,
        )
