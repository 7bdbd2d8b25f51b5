"""Golden cases of verification: chains, greedy and sampled, and the target's distribution.

Each function takes a case folder, reads every size and option from its files, and raises
AssertionError where jspec differs.
"""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from jspec.coins import Coins, draw_coins
from jspec.round import Dense, OneHot, Proposal, Sparse
from jspec.sampling import SamplingTable, empty_history, empty_table
from jspec.target_rows import TargetRows, target_rows
from jspec.verify.batch import verify

TOLERANCE = 1e-5


def run_greedy_chain(folder: Path) -> None:
    """`b_greedy_verify`, the chains in it: accepted lengths, bonus, emitted and committed tokens."""
    arrays = load_file(folder / "b_greedy_verify.safetensors")
    chains = sorted({key.split(".")[0] for key in arrays if re.match(r"chain\d+\.", key)})
    assert chains, "b_greedy_verify: no chain in the file"
    for name in chains:
        case = _fields(arrays, name)
        candidates, predicted = case["candidates"], case["target_predict"]
        lanes, width = candidates.shape
        vocabulary = int(max(candidates.max(), predicted.max())) + 1
        logits = np.zeros((lanes * width, vocabulary), np.float32)
        logits[np.arange(lanes * width), predicted.reshape(-1)] = 1
        proposal = _chain(candidates[:, 1:], OneHot())
        table = empty_table(lanes, vocabulary, 1)
        verdict = _verify_chain(proposal, _all_rows(logits, lanes), table)

        accept_length, bonus = np.asarray(verdict.accept_length), np.asarray(verdict.bonus)
        _equal(name, "correct_len", accept_length, case["correct_len"])
        _equal(name, "bonus", bonus, case["bonus"])
        commit_length = np.sum(np.asarray(verdict.path) >= 0, axis=1)
        _equal(name, "commit_lens", commit_length, case["commit_lens"])
        _equal(name, "new_seq_lens", case["prefix_lens"] + commit_length, case["new_seq_lens"])
        # Their block keeps all draft tokens, with the bonus written over the first one refused.
        out = np.concatenate([candidates[:, 1:], np.zeros((lanes, 1), candidates.dtype)], axis=1)
        out[np.arange(lanes), accept_length] = bonus
        _equal(name, "out_tokens", out, case["out_tokens"])


def run_chain_rejection(folder: Path) -> None:
    """`c_chain_rejection`: p/q and block verification with given coins, every kind of q."""
    arrays = load_file(folder / "c_chain_rejection.safetensors")
    cases = json.loads((folder / "c_chain_rejection.json").read_text())
    assert cases, "c_chain_rejection: no case in the file"
    for meta in cases:
        name = f"c{meta['id']}"
        case = _fields(arrays, name)
        lanes, width, vocabulary = case["target_probs"].shape
        with np.errstate(divide="ignore"):
            logits = np.log(case["target_probs"])
        rows = _all_rows(logits.reshape(-1, vocabulary), lanes)
        table = dataclasses.replace(
            empty_table(lanes, vocabulary, 1), temperature=jnp.ones((lanes,), jnp.float32)
        )
        coins = Coins(accept=jnp.asarray(case["uniforms"]), bonus=jnp.asarray(case["uniform_final"]))
        for q in _kinds_of_q(case, meta["kind"]):
            verdict = _verify_chain(
                _chain(case["candidates"][:, 1:], q), rows, table, coins, meta["block_verification"]
            )
            label = f"{name} ({meta['kind']}, {type(q).__name__})"
            accept_length = np.asarray(verdict.accept_length)
            _equal(label, "correct_len", accept_length, case["correct_len"])
            _equal(label, "bonus", np.asarray(verdict.bonus), case["bonus"])
            # Their accept_index numbers the nodes of all lanes in one row.
            first = np.arange(lanes)[:, None] * width
            path = np.asarray(verdict.path)
            _equal(label, "accept_index", np.where(path >= 0, path + first, -1), case["accept_index"])
            index = np.arange(width)[None, :]
            drafts = np.concatenate([case["candidates"][:, 1:], np.full((lanes, 1), -1)], axis=1)
            emitted = np.where(index < accept_length[:, None], drafts, -1)
            emitted[np.arange(lanes), accept_length] = np.asarray(verdict.bonus)
            _equal(label, "predicts", emitted.reshape(-1), case["predicts"])


def run_target_probs(folder: Path) -> None:
    """`x_target_probs`: temperature, then top-k, then top-p."""
    arrays = load_file(folder / "x_target_probs.safetensors")
    cases = json.loads((folder / "x_target_probs.json").read_text())
    assert cases, "x_target_probs: no case in the file"
    for meta in cases:
        name = f"t{meta['id']}"
        case = _fields(arrays, name)
        lanes, width, vocabulary = case["probs"].shape
        table = dataclasses.replace(
            empty_table(lanes, vocabulary, 1),
            temperature=jnp.asarray(case["temperatures"].reshape(lanes), jnp.float32),
            top_k=jnp.asarray(case["top_ks"].reshape(lanes), jnp.int32),
            top_p=jnp.asarray(case["top_ps"].reshape(lanes), jnp.float32),
        )
        rows = jax.jit(target_rows)(
            jnp.asarray(case["logits"].reshape(-1, vocabulary)),
            table,
            empty_history(lanes, vocabulary),
            jnp.arange(lanes, dtype=jnp.int32),
            jnp.arange(lanes, dtype=jnp.int32) * width,
            _chain(np.zeros((lanes, width - 1), np.int32), OneHot()),
            jnp.zeros((lanes,), jnp.int32),
        )
        for node in range(width):
            probs = np.exp(rows.row(jnp.full((lanes,), node, jnp.int32)))
            np.testing.assert_allclose(
                probs,
                case["probs"][:, node],
                rtol=TOLERANCE,
                atol=TOLERANCE,
                err_msg=f"x_target_probs {name}: probabilities after node {node}",
            )
            kept, wanted = probs > 0, case["probs"][:, node] > 0
            _equal(f"{name} node {node}", "kept tokens", kept, wanted)


def _fields(arrays: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {
        key.removeprefix(f"{name}."): array for key, array in arrays.items() if key.startswith(f"{name}.")
    }


def _kinds_of_q(case: dict[str, np.ndarray], kind: str) -> list[OneHot | Dense | Sparse]:
    """Every form in which this case's q can be said; all must give the same verdict."""
    kinds: list[OneHot | Dense | Sparse] = [Dense(probs=jnp.asarray(case["draft_probs"]), ids=None)]
    backwards = np.arange(case["draft_probs"].shape[2], dtype=np.int32)[::-1]
    kinds.append(
        Dense(probs=jnp.asarray(case["draft_probs"][:, :, ::-1].copy()), ids=jnp.asarray(backwards.copy()))
    )
    if "candidate_ids" in case:
        kinds.append(
            Sparse(ids=jnp.asarray(case["candidate_ids"], jnp.int32), probs=jnp.asarray(case["q_rows"]))
        )
    if kind == "onehot":
        kinds.append(OneHot())
    return kinds


def _chain(tokens: np.ndarray, q: OneHot | Dense | Sparse) -> Proposal:
    lanes, drafts = tokens.shape
    return Proposal(
        tokens=jnp.asarray(tokens, jnp.int32),
        lengths=jnp.full((lanes,), drafts, jnp.int32),
        q=q,
    )


def _all_rows(logits: np.ndarray, lanes: int) -> TargetRows:
    """Rows of lanes that have one for every node, from logits that need nothing more."""
    rows = logits.shape[0]
    return TargetRows(
        logits=jnp.asarray(logits, jnp.float32),
        log_normaliser=jnp.zeros((rows,), jnp.float32),
        floor=jnp.full((rows,), -jnp.inf, jnp.float32),
        starts=jnp.arange(lanes, dtype=jnp.int32) * (rows // lanes),
    )


def _verify_chain(
    proposal: Proposal,
    rows: TargetRows,
    table: SamplingTable,
    coins: Coins | None = None,
    block_verification: bool = False,
    verify_lengths: jnp.ndarray | None = None,
):
    lanes, drafts = proposal.tokens.shape
    zeros = jnp.zeros((lanes,), jnp.int32)
    if coins is None:
        coins = draw_coins(table.seeds, zeros, drafts)
    return _jitted_verify(block_verification)(
        proposal,
        rows,
        proposal.lengths if verify_lengths is None else verify_lengths,
        coins,
        table,
        jnp.arange(lanes, dtype=jnp.int32),
        zeros,
    )


@functools.cache
def _jitted_verify(block_verification: bool):
    return jax.jit(functools.partial(verify, block_verification=block_verification))


def _equal(name: str, what: str, got: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(got, expected, err_msg=f"{name}: {what}")
