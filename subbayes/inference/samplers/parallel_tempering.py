r"""Parallel tempering (Geyer 1991) over elliptical slice moves, vectorised over ladders and rungs.

Each chain is a ladder of R densities between posterior and prior,

$$ \pi_r(z) \propto L(z)^{\beta_r / T}\, p(z), \qquad 1 = \beta_0 > \dots > \beta_{R-1} = 0, $$

which move in parallel and swap their points: rungs r and r + 1 with probability
$\min\{1, \exp[(\beta_r - \beta_{r+1})(\ell_{r+1} - \ell_r) / T]\}$, even pairs in even rounds and
odd pairs in odd rounds (deterministic, non-reversible swaps: Okabe et al. 2001; Syed et al. 2022).
The draws are those of the cold rung, $\beta_0 = 1$.

**Cost of the swaps.** A round is a fixed number of moves: stopping a round after a fixed number of
evaluations would favour points with short moves. A swap therefore waits until *both* its rungs have
made their moves. No other rung and no other ladder waits, and hot rungs, whose moves are cheap,
make more moves per round. The statistic "idle" is the share of evaluations spent on waiting rungs,
about a third.

Geyer (1991), *Markov chain Monte Carlo maximum likelihood*; Syed, Bouchard-Côté, Deligiannidis &
Doucet (2022), *Non-reversible parallel tempering*, algorithms 1 and 4; Meng & Wong (1996), bridge
sampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import erfcinv
from typing_extensions import override

from subbayes.draws import Draws
from subbayes.inference.configuration import Sampling
from subbayes.inference.density import Density
from subbayes.inference.importance_sampling import evidence_of_groups
from subbayes.inference.samplers import elliptical_slice
from subbayes.inference.samplers.adaptation import Schedule
from subbayes.inference.samplers.chains import Info, Rngs, Sampler
from subbayes.inference.samplers.shapes import (
    ChainCounts,
    ChainMask,
    ChainPoints,
    ChainValues,
    SomeChains,
)
from subbayes.inference.samplers.states import blank_state, copy_state, select_chains, take
from subbayes.priors import reject_undefined
from subbayes.utils.checks import check_count

_AHEAD = 32
_MOST_MOVES = 20
_SPACING = 5.0  # of the first ladder: beta_r = (1 - r / (R - 1))^5
_COLD, _HOT = 1, 2  # 0: a point that has been at neither end
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
    """Point and elliptical slice search of every rung, and statistics of each ladder."""

    z: ChainPoints  # points of the cold rungs
    points: Float[np.ndarray, "chains rungs k"]  # cold rung first
    log_likelihood: Float[np.ndarray, "chains rungs"]  # at temperature 1
    # Elliptical slice sampling; see elliptical_slice.State.
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
    # Ladder.
    beta: Float[np.ndarray, "chains rungs"]  # powers of the likelihood
    moves: Int[np.ndarray, "chains rungs"]  # per round
    moves_left: Int[np.ndarray, "chains rungs"]  # in this round; 0 waits for a swap
    round: Int[np.ndarray, "chains rungs"]  # rounds completed
    swap_uniforms: Float[np.ndarray, "chains ahead_swaps gaps"]  # drawn ahead
    n_swap_uniforms: ChainCounts  # rows of them that are used
    count: ChainCounts  # rounds of the cold rung
    steps: ChainCounts  # batched evaluations since its last round
    # Statistics.
    spent: Int[np.ndarray, "chains rungs"]  # evaluations of working rungs
    moves_made: Int[np.ndarray, "chains rungs"]
    idle: ChainCounts  # evaluations of waiting rungs
    swaps_tried: Float[np.ndarray, "chains gaps"]
    swaps_rejected: Float[np.ndarray, "chains gaps"]  # sum of rejection probabilities
    bridge_up: Float[np.ndarray, "chains gaps"]  # log sum of exp(gap / 2), upper rung's draws
    bridge_down: Float[np.ndarray, "chains gaps"]  # log sum of exp(-gap / 2), lower rung's draws
    bridge_draws: Int[np.ndarray, "chains rungs"]  # draws of each rung in these sums
    origin: Int[np.ndarray, "chains rungs"]  # end of the ladder a point last visited: _COLD, _HOT
    trips: ChainCounts  # journeys of points from the prior to the posterior


@dataclass
class _Powers:
    """The densities of all rungs as one batch: powers of the likelihood under one prior."""

    posterior: Density
    power: Float[np.ndarray, "rows"]
    temperature: float = 1.0

    def __post_init__(self) -> None:
        self.rank, self.prior = self.posterior.rank, self.posterior.prior
        self.raw: Float[np.ndarray, "rows"] = np.zeros(0)

    def fingerprint(self) -> str:
        return self.posterior.fingerprint()

    def log_likelihood(self, z: Float[np.ndarray, "rows k"]) -> Float[np.ndarray, "rows"]:
        self.raw = reject_undefined(self.posterior.log_likelihood(z))
        return _temper(self.power, self.raw)


def _temper(power: np.ndarray, raw: np.ndarray) -> np.ndarray:
    """beta l; 0 on the prior's rung, even where l is minus infinity."""
    return np.multiply(power, raw, where=power > 0, out=np.zeros_like(raw))


@dataclass(frozen=True)
class Kernel:
    """The transition: `init` and `step` on a posterior with a Gaussian prior."""

    warmup: int  # draws per ladder in which powers and moves per round adapt
    rungs: int

    name = "parallel-tempering"
    state_type = State

    def init(self, posterior: Density, z: ChainPoints, rngs: Rngs) -> State:
        """The state with all rungs of a ladder at its start point."""
        (chains, k), rungs = z.shape, self.rungs
        beta = np.tile((1 - np.arange(rungs) / (rungs - 1)) ** _SPACING, (chains, 1))
        powers = _Powers(posterior, beta.reshape(-1) / posterior.temperature)
        flat = elliptical_slice.Kernel().init(
            powers, np.repeat(z, rungs, 0), _repeat_generators(rngs, rungs)
        )
        s = blank_state(
            State,
            chains=chains,
            rungs=rungs,
            k=k,
            gaps=rungs - 1,
            ahead=flat.uniforms.shape[1],
            ahead_normals=flat.normals.shape[1],
            ahead_swaps=_AHEAD,
        )
        s.z[:], s.points[:], s.beta[:] = z, _by_ladder(flat.z, rungs), beta
        s.log_likelihood[:] = _by_ladder(powers.raw, rungs)
        _store_search(s, flat)
        s.moves[:], s.moves_left[:] = 1, 1
        s.bridge_up[:], s.bridge_down[:] = -np.inf, -np.inf
        s.n_swap_uniforms[:] = _AHEAD
        s.origin[:, 0], s.origin[:, -1] = _COLD, _HOT
        return s

    def step(self, posterior: Density, state: State, rngs: Rngs) -> tuple[State, Info]:
        """Try one angle on every rung of every ladder."""
        s = copy_state(state)
        powers = _Powers(posterior, s.beta.reshape(-1) / posterior.temperature)
        working = s.moves_left > 0
        accepted = _try_angles(s, powers, working, rngs)
        s.moves_left[accepted] -= 1
        s.steps[:] += 1
        s.spent[:] += working
        s.moves_made[:] += accepted
        s.idle[:] += (~working).sum(1)
        ended = self._swap(posterior, s, rngs)
        finished = ended[:, 0]
        s.z[finished] = s.points[finished, 0]
        s.count[:] += finished
        info = Info(finished, _stats(s) if finished.any() else {})
        s.steps[finished] = 0
        self._adapt(posterior, s, finished, rngs)
        return s, info

    def _swap(self, posterior: Density, s: State, rngs: Rngs) -> Bool[np.ndarray, "chains rungs"]:
        """Swap points where both rungs of a pair are ready; return the rungs that end a round."""
        ready, rung = s.moves_left == 0, np.arange(self.rungs)
        lower = (rung + s.round) % 2 == 0  # of its pair in this round
        pair = ready[:, :-1] & ready[:, 1:] & lower[:, :-1] & (s.round[:, :-1] == s.round[:, 1:])
        ended = ready & ((lower & (rung == self.rungs - 1)) | (~lower & (rung == 0)))  # no partner
        ended[:, :-1] |= pair
        ended[:, 1:] |= pair
        if pair.any():
            _accept_swaps(posterior, s, pair, rngs)
        if ended.any():
            s.round[ended] += 1
            s.moves_left[ended] = s.moves[ended]
            if (s.count >= self.warmup).any():
                _update_bridges(posterior, s, ended & (s.count >= self.warmup)[:, None])
        return ended

    def _adapt(self, posterior: Density, s: State, finished: ChainMask, rngs: Rngs) -> None:
        """At the end of a window, set powers of equal swap rates and restart the ladder's moves."""
        ends = [*Schedule.of(self.warmup).ends, self.warmup]
        rows = np.flatnonzero(finished & np.isin(s.count, ends))
        if not rows.size:
            return
        for c in rows:
            if s.count[c] < self.warmup:
                s.beta[c] = equal_rates(
                    s.beta[c], s.swaps_rejected[c] / np.maximum(s.swaps_tried[c], 1)
                )
            cost = s.spent[c] / np.maximum(s.moves_made[c], 1)
            s.moves[c] = np.clip(np.rint(cost.max() / np.maximum(cost, 1)), 1, _MOST_MOVES)
            s.moves_left[c] = s.moves[c]
            s.round[c] = s.round[c, 0]
        for counter in (s.spent, s.moves_made, s.idle, s.swaps_tried, s.swaps_rejected, s.trips):
            counter[rows] = 0
        _restart_moves(posterior, s, rows, rngs)


def _repeat_generators(rngs: Rngs, rungs: int) -> Rngs:
    return [rng for rng in rngs for _ in range(rungs)]


def _by_ladder(rows: np.ndarray, rungs: int) -> np.ndarray:
    """Reshape (chains * rungs, ...) to (chains, rungs, ...)."""
    return rows.reshape(-1, rungs, *rows.shape[1:])


def _flat(s: State, powers: _Powers) -> elliptical_slice.State:
    """The rungs of all ladders as the chains of elliptical slice sampling."""

    def rows(array: np.ndarray) -> np.ndarray:
        return array.reshape(-1, *array.shape[2:])

    return elliptical_slice.State(
        z=rows(s.points),
        log_likelihood=_temper(powers.power, rows(s.log_likelihood)),
        **{name: rows(getattr(s, name)) for name in _SEARCH},
    )


def _restart_moves(posterior: Density, s: State, rows: SomeChains, rngs: Rngs) -> None:
    """Draw new ellipses and thresholds for all rungs of ladders whose powers have changed."""
    part = State(**{name: array[rows] for name, array in vars(s).items()})
    powers = _Powers(posterior, part.beta.reshape(-1) / posterior.temperature)
    fresh = np.ones(part.beta.size, dtype=bool)
    moved = elliptical_slice.next_angles(
        powers,
        _flat(part, powers),
        fresh,
        _repeat_generators([rngs[c] for c in rows], s.beta.shape[1]),
    )
    _store_search(part, moved)
    for name in _SEARCH:
        getattr(s, name)[rows] = getattr(part, name)


def _store_search(s: State, flat: elliptical_slice.State) -> None:
    """Store the searches of all rungs."""
    for name in _SEARCH:
        getattr(s, name)[:] = _by_ladder(getattr(flat, name), s.beta.shape[1])


def _try_angles(
    s: State, powers: _Powers, working: Bool[np.ndarray, "chains rungs"], rngs: Rngs
) -> Bool[np.ndarray, "chains rungs"]:
    """Evaluate every rung once; return the working rungs that have made a move."""
    flat = _flat(s, powers)
    moved, info = elliptical_slice.Kernel().step(
        powers, flat, _repeat_generators(rngs, working.shape[1])
    )
    kept = select_chains(working.reshape(-1), moved, flat)
    accepted = info.finished.reshape(working.shape) & working
    _store_search(s, kept)
    s.points[:] = _by_ladder(kept.z, working.shape[1])
    s.log_likelihood[accepted] = powers.raw.reshape(working.shape)[accepted]
    return accepted


def _accept_swaps(
    posterior: Density, s: State, pair: Bool[np.ndarray, "chains gaps"], rngs: Rngs
) -> None:
    """Accept or reject the swaps of `pair`."""
    rows = np.flatnonzero(pair.any(1))  # only these use random numbers of their streams
    u = np.ones(pair.shape)
    u[rows] = take(s, "swap_uniforms", rngs, rows)[:, 0]
    # l may be minus infinity on the prior's rung: the ratio is then 0 and the swap is rejected.
    gap = (s.beta[:, :-1] - s.beta[:, 1:]) / posterior.temperature
    with np.errstate(over="ignore", invalid="ignore"):
        log_ratio = gap * (s.log_likelihood[:, 1:] - s.log_likelihood[:, :-1])
        chance = np.exp(np.minimum(log_ratio, 0.0))
    s.swaps_tried[:] += pair
    s.swaps_rejected[:] += np.where(pair, 1 - chance, 0.0)
    c, r = np.nonzero(pair & (u < chance))
    before = _temper(s.beta / posterior.temperature, s.log_likelihood)
    for array in (s.points, s.log_likelihood, s.origin):
        array[c, r], array[c, r + 1] = array[c, r + 1], array[c, r].copy()
    # The threshold of the next move is relative to the point it starts from.
    s.threshold[:] += _temper(s.beta / posterior.temperature, s.log_likelihood) - before
    s.trips[:] += s.origin[:, 0] == _HOT
    s.origin[:, 0], s.origin[:, -1] = _COLD, _HOT


def _update_bridges(posterior: Density, s: State, rungs: Bool[np.ndarray, "chains rungs"]) -> None:
    """Add the points of `rungs` to the bridge sampling sums with their neighbours."""
    half = 0.5 * (s.beta[:, :-1] - s.beta[:, 1:]) / posterior.temperature
    s.bridge_up[:] = np.where(
        rungs[:, 1:], np.logaddexp(s.bridge_up, half * s.log_likelihood[:, 1:]), s.bridge_up
    )
    with np.errstate(over="ignore"):
        s.bridge_down[:] = np.where(
            rungs[:, :-1],
            np.logaddexp(s.bridge_down, -half * s.log_likelihood[:, :-1]),
            s.bridge_down,
        )
    s.bridge_draws[:] += rungs


def _stats(s: State) -> dict[str, np.ndarray]:
    """Statistics of a draw; rates and evidence are averages over the ladder's run so far."""
    rejected = s.swaps_rejected / np.maximum(s.swaps_tried, 1)
    least = s.bridge_draws.min(1)
    drawn = least > 0
    n = np.log(np.maximum(s.bridge_draws, 1))
    # -inf before the first draw
    up, down = np.where(drawn[:, None], (s.bridge_up - n[:, 1:], s.bridge_down - n[:, :-1]), 0.0)
    return {
        "log_likelihood": s.log_likelihood[:, 0].copy(),
        "evaluations": s.steps * s.beta.shape[1],
        "swap_rate": 1 - rejected.mean(1),
        "least_swap_rate": 1 - rejected.max(1),
        "barrier": lengths(rejected).sum(1),
        "round_trips": s.trips.copy(),
        "idle": s.idle / np.maximum(s.idle + s.spent.sum(1), 1),
        "log_evidence": np.where(drawn, (up - down).sum(1), np.nan),
        "bridge_bias": np.where(drawn, bridge_bias(up + down, least), np.nan),
    }


def lengths(rejected: Float[np.ndarray, "*c gaps"]) -> Float[np.ndarray, "*c gaps"]:
    r"""Lengths of gaps in the units of rejection rates, to which those of small gaps are equal.

    Rates of wide gaps saturate at 1. If the energies of the rungs are Gaussian, swaps are accepted
    at the rate $\mathrm{erfc}(d / 2)$ with a length d that adds up along the ladder (Predescu et
    al. 2004), and small gaps have the rejection rate $d / \sqrt\pi$.
    """
    return np.asarray(2 * erfcinv(np.clip(1 - rejected, 1e-300, 1.0)) / np.sqrt(np.pi))


def equal_rates(
    beta: Float[np.ndarray, "rungs"], rejected: Float[np.ndarray, "gaps"]
) -> Float[np.ndarray, "rungs"]:
    """Powers between which swaps are rejected equally often (Syed et al. 2022, algorithm 4).

    The cumulative length of the path is interpolated on the scale of the first ladder's spacing and
    divided into equal parts.
    """
    sums = np.concatenate([[0.0], np.cumsum(lengths(rejected) + 0.01)])
    even = np.linspace(0, sums[-1], len(beta))
    new = np.interp(even, sums, beta ** (1 / _SPACING)) ** _SPACING
    new[0], new[-1] = 1.0, 0.0
    return new


def bridge_bias(log_overlap: Float[np.ndarray, "chains gaps"], draws: ChainCounts) -> ChainValues:
    r"""Error of bridge sampling between rungs that overlap too little, of each ladder.

    For the geometric bridge the product of the two means that it divides, $\mathrm{BC}^2$ with the
    Bhattacharyya coefficient BC of the rungs, gives the relative variance
    $2 (\mathrm{BC}^{-2} - 1) / n$ of the estimated ratio (Meng & Wong 1996), and
    $\tfrac12 \log(1 + \text{relative variance})$ is the bias of its logarithm. It vanishes as
    1 / n, and grows with the distance between rungs that do not overlap, of which no draw tells the
    ratio.

    Args:
        log_overlap: $\log \mathrm{BC}^2$ of neighbours.
        draws: n, of each rung.

    Example:
        >>> bridge_bias(np.array([[-0.1, -0.1], [-0.1, -20.0]]), np.array([100, 100])).round(2)
        array([0.  , 8.04])
    """
    with np.errstate(invalid="ignore"):
        log_variance = np.log(2 / np.maximum(draws, 1))[:, None] + np.log(
            np.expm1(np.clip(-log_overlap, 1e-12, 700))
        )
    return np.asarray(np.sqrt(((0.5 * np.logaddexp(0, log_variance)) ** 2).sum(1)))


def evidence_of_ladders(
    running: Float[np.ndarray, "chains draws"], bias: ChainValues
) -> tuple[float, float]:
    r"""Log evidence of ladders and its standard error; NaN for a single ladder.

    The estimate is the log of the mean: a ladder that has missed modes is too low. With the
    variance $s^2$ of the L ladders' logarithms, $d_l$ the change of ladder l in the second half of
    its run and $w^2$ the mean of $d_l^2$,

    $$ \text{error}^2 = \frac{s^2}{L} + \frac{L - 1}{L} (s^2 - 2 w^2)_+
       + (\bar d^2 - 4 s_d^2 / L)_+ + \overline{b^2} . $$

    If ladders mix, $w^2 \approx s^2$ and only the first term remains. The second counts in full
    what ladders differ by more than they change: they are stuck in different modes, and more of
    them would not help. The third is a common drift, the last the bias between distant rungs.

    Args:
        running: log evidence of each ladder up to each draw.
        bias: b of each ladder, see `bridge_bias`.

    Example:
        >>> moving = np.array([[0.1, 0.0], [-0.2, 0.0], [0.3, 0.0]])
        >>> stuck = np.array([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]])
        >>> [round(evidence_of_ladders(x, np.zeros(3))[1], 2) for x in (moving, stuck)]
        [0.0, 1.0]
    """
    logs, ladders = running[:, -1], len(running)
    log_mean = evidence_of_groups(logs)[0]
    if ladders == 1 or not np.isfinite(logs).all():
        return log_mean, math.nan
    variance = float(logs.var(ddof=1))
    error = variance / ladders + float(np.square(bias).mean())
    half = running[:, max(running.shape[1] // 2 - 1, 0)]
    if running.shape[1] > 1 and np.isfinite(half).all():
        change = logs - half
        within = float(np.square(change).mean())
        error += (1 - 1 / ladders) * max(variance - 2 * within, 0.0)
        noise = float(change.var(ddof=1)) / ladders
        error += max(float(change.mean()) ** 2 - 4 * noise, 0.0)
    return log_mean, math.sqrt(error)


@dataclass(frozen=True)
class ParallelTempering(Sampler):
    r"""Parallel tempering: samples a posterior with all its modes and estimates its evidence.

    The prior has to be Gaussian. A chain is a ladder, and an evaluation is of chains x rungs
    points; draws are those of the cold rung. The default warm-up is half as long as the chain
    after it, `draws * thin // 2`, at least 200.

    The draws have the stats "log_likelihood" (at temperature 1) and "evaluations" (of all rungs),
    and of the run so far "swap_rate", "least_swap_rate" (of any pair), "round_trips", "barrier"
    (sum of rejection rates of a fine ladder, $\Lambda$), "idle", "log_evidence" and "bridge_bias";
    meta has their final values. The log evidence of the tempered posterior is estimated by bridge
    sampling between neighbouring rungs; its standard error, from differences between ladders,
    their drift and the overlap of rungs, needs several ladders. `Draws.warnings` names swap rates
    below 0.2.

    Attributes:
        rungs: densities in a ladder, posterior and prior included; about twice the barrier is
            best.

    Raises:
        InputError: start points of zero density, or a checkpoint of another run.

    Example:
        >>> import subbayes, torch
        >>> net = subbayes.Network(torch.nn.Linear(1, 1))
        >>> data = torch.randn(30, 1), torch.randn(30)
        >>> space = subbayes.subspace.FullSubspace(net.weights)
        >>> posterior = subbayes.Posterior(net, subbayes.likelihoods.Gaussian(1.0), data, space)
        >>> engine = ParallelTempering(rungs=4)
        >>> engine.sample(posterior, draws=50, chains=2, warmup=50, progress=False).z.shape
        (2, 50, 2)
    """

    name = "parallel-tempering"
    any_density = True
    rungs: int = 12

    def __post_init__(self) -> None:
        check_count("rungs", self.rungs, 2)

    def default_warmup(self, sampling: Sampling) -> int:
        """`draws * thin // 2`, at least 200."""
        return max(sampling.draws * sampling.thin // 2, 200)

    def kernel(self, posterior: Density, warmup: int) -> Kernel:
        """The transition, which adapts in the warm-up."""
        return Kernel(warmup, self.rungs)

    @classmethod
    @override
    def warnings(cls, draws: Draws) -> list[str]:
        doubt = "the evidence and the shares of modes are not to be trusted"
        last = {name: values[:, -1] for name, values in draws.stats.items()}
        if not {"least_swap_rate", "barrier", "round_trips"} <= last.keys():
            return []
        if (least := float(last["least_swap_rate"].min())) < 0.2:
            rungs = math.ceil(2 * float(last["barrier"].max())) + 1
            return [
                f"the least swap rate is {math.floor(least * 100) / 100:.2f}, below 0.2: {doubt}; "
                f"raise rungs (about {rungs}), or warm up longer (warmup=...)"
            ]
        if (trips := int(last["round_trips"].sum())) < 3 * draws.n_chains:
            return [
                f"{trips} points moved from the prior to the posterior, below 3 for each of "
                f"{draws.n_chains} ladders: {doubt}; run longer (draws=...)"
            ]
        return []

    @override
    def run(self, posterior: Density, sampling: Sampling) -> Draws:
        draws = super().run(posterior, sampling)
        last = {name: values[:, -1] for name, values in draws.stats.items()}
        summary = {
            "swap_rate": float(last["swap_rate"].mean()),
            "least_swap_rate": float(last["least_swap_rate"].min()),
            "barrier": float(last["barrier"].mean()),
            "idle": float(last["idle"].mean()),
            "round_trips": int(last["round_trips"].sum()),
        }
        value, error = evidence_of_ladders(draws.stats["log_evidence"], last["bridge_bias"])
        return replace(
            draws, meta=draws.meta | summary, log_evidence=value, log_evidence_error=error
        )
