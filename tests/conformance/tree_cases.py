"""Golden cases of draft trees: growth, greedy and sampled verification, a grammar's masks.

The trees of the other files are those of `a_tree_build`, in the same folder; jspec's own growth makes them.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from jspec.coins import Coins, draw_coins
from jspec.drafters.tree import Frontier, Ranked, grow
from jspec.drafters.tree_shape import dynamic_tree
from jspec.grammar.tree import fill_allowed
from jspec.round import Proposal, Verdict
from jspec.sampling import empty_table
from jspec.target_rows import TargetRows
from jspec.verify.batch import verify

Arrays = dict[str, np.ndarray]
# Compiling takes far longer than running.
verify_trees = jax.jit(verify, compiler_options={"xla_backend_optimization_level": 0})


def fields(arrays: Arrays, name: str) -> Arrays:
    """The arrays of one case, without the case in their names."""
    return {
        key.removeprefix(f"{name}."): array for key, array in arrays.items() if key.startswith(f"{name}.")
    }


def equal(name: str, what: str, got: object, expected: object) -> None:
    """Integers agree exactly."""
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected), err_msg=f"{name}: {what}")


@functools.cache
def trees(folder: Path) -> dict[int, tuple[dict, Arrays, Proposal, tuple[Frontier, ...]]]:
    """Settings, arrays, proposal and frontiers of every case of `a_tree_build`."""
    arrays = load_file(folder / "a_tree_build.safetensors")
    metas = json.loads((folder / "a_tree_build.json").read_text())
    assert metas, "a_tree_build: no case in the file"
    return {meta["case"]: (meta, *_grown(meta, fields(arrays, f"case{meta['case']}"))) for meta in metas}


def _grown(meta: dict, case: Arrays) -> tuple[Arrays, Proposal, tuple[Frontier, ...]]:
    lanes, width = meta["bs"], meta["topk"]
    shape = dynamic_tree(width=width, depth=meta["num_steps"], draft_length=meta["num_draft_tokens"] - 1)

    def ranked(depth: int) -> Ranked:
        return Ranked(
            ids=jnp.asarray(case[f"in.topk_index.{depth}"].reshape(lanes, -1, width), jnp.int32),
            probs=jnp.asarray(case[f"in.topk_p.{depth}"].reshape(lanes, -1, width)),
        )

    @jax.jit
    def growth() -> tuple[Proposal, tuple[Frontier, ...]]:
        return grow(shape, ranked(0), lambda seen, frontier: ((*seen, frontier), ranked(frontier.depth)), ())

    return case, *growth()


def parents_of(proposal: Proposal) -> np.ndarray:
    """Also of a chain."""
    lanes, drafts = proposal.tokens.shape
    if proposal.parents is None:
        return np.broadcast_to(np.arange(drafts), (lanes, drafts))
    return np.asarray(proposal.parents)


def run_tree_build(folder: Path) -> None:
    """`a_tree_build`: frontiers, draft tokens and the links, positions and masks that follow from parents."""
    for number, (meta, case, proposal, frontiers) in trees(folder).items():
        name, lanes, width = f"case{number}", meta["bs"], meta["topk"]
        for index, frontier in enumerate(frontiers):
            equal(
                name,
                f"frontier_ids.{index}",
                frontier.tokens.reshape(-1),
                case[f"step.frontier_ids.{index}"],
            )
            rows = np.arange(lanes)[:, None] * (1 if index == 0 else width) + np.asarray(frontier.sources)
            equal(name, f"frontier_src_row.{index}", rows.reshape(-1), case[f"step.frontier_src_row.{index}"])
        nodes = meta["num_draft_tokens"]
        equal(name, "draft_tokens", proposal.tokens, case["draft_tokens"])
        flat = np.concatenate([case["in.bonus_tokens"][:, None], proposal.tokens], axis=1)
        equal(name, "draft_token_flat", flat.reshape(-1), case["draft_token_flat"])

        parents = parents_of(proposal)
        children, siblings = np.full((2, lanes, nodes), -1)
        sees = np.zeros((lanes, nodes, nodes), bool)
        for lane in range(lanes):
            for node in range(nodes - 1, 0, -1):
                parent = parents[lane, node - 1]
                siblings[lane, node], children[lane, parent] = children[lane, parent], node
            for node in range(nodes):
                if node:
                    sees[lane, node] = sees[lane, parents[lane, node - 1]]
                sees[lane, node, node] = True
        equal(name, "retrieve_next_token", children, case["retrieve_next_token"])
        equal(name, "retrieve_next_sibling", siblings, case["retrieve_next_sibling"])
        equal(name, "tree_mask_qlen", sees.reshape(-1), case["tree_mask_qlen"])
        positions = case["in.seq_lens"][:, None] + sees.sum(axis=2) - 1
        equal(name, "positions", positions.reshape(-1), case["positions"])


def judge(proposal: Proposal, logits: np.ndarray, temperature: float, coins: Coins | None = None) -> Verdict:
    """Verifies all of every lane's tree against rows that need nothing more."""
    lanes, nodes, vocabulary = logits.shape
    zeros = jnp.zeros((lanes,), jnp.int32)
    rows = TargetRows(
        logits=jnp.asarray(logits.reshape(-1, vocabulary), jnp.float32),
        log_normaliser=jnp.zeros((lanes * nodes,), jnp.float32),
        floor=jnp.full((lanes * nodes,), -jnp.inf, jnp.float32),
        starts=jnp.arange(lanes, dtype=jnp.int32) * nodes,
    )
    table = dataclasses.replace(
        empty_table(lanes, vocabulary, 1), temperature=jnp.full((lanes,), temperature, jnp.float32)
    )
    coins = draw_coins(table.seeds, zeros, nodes - 1) if coins is None else coins
    return verify_trees(
        proposal, rows, proposal.lengths, coins, table, jnp.arange(lanes, dtype=jnp.int32), zeros
    )


def emitted(proposal: Proposal, verdict: Verdict) -> np.ndarray:
    """Accepted tokens and the bonus, -1 behind it, as wide as the path."""
    path, bonus = np.asarray(verdict.path), np.asarray(verdict.bonus)
    out = np.full(path.shape, -1)
    for lane, nodes in enumerate(path):
        accepted = [node for node in nodes[1:] if node >= 0]
        out[lane, : len(accepted)] = np.asarray(proposal.tokens)[lane, np.asarray(accepted, int) - 1]
        out[lane, len(accepted)] = bonus[lane]
    return out


def in_one_row(path: np.ndarray, nodes: int) -> np.ndarray:
    """Their node numbers run over all lanes."""
    return np.where(path >= 0, path + np.arange(len(path))[:, None] * nodes, -1)


def predicted(path: np.ndarray, block: np.ndarray, nodes: int) -> np.ndarray:
    """Their `predict`: at each visited node the token after it, 0 elsewhere."""
    out = np.zeros((len(path), nodes), int)
    for lane, visited in enumerate(path):
        for place, node in enumerate(visited[visited >= 0]):
            out[lane, node] = block[lane, place]
    return out.reshape(-1)


def wide(path: np.ndarray, columns: int) -> np.ndarray:
    """With as many columns as theirs, which may have room for paths that were not kept."""
    return np.pad(path, ((0, 0), (0, columns - path.shape[1])), constant_values=-1)


def run_greedy_trees(folder: Path) -> None:
    """`b_greedy_verify`, the trees in it."""
    arrays = load_file(folder / "b_greedy_verify.safetensors")
    for item in json.loads((folder / "b_greedy_verify.json").read_text()):
        meta, _, proposal, _ = trees(folder)[item["tree_case"]]
        name, nodes = f"case{item['tree_case']}.rep{item['rep']}", meta["num_draft_tokens"]
        case = fields(arrays, name)
        logits = np.eye(meta["vocab"], dtype=np.float32)[case["target_predict"]]
        verdict = judge(proposal, logits, temperature=0)
        columns = case["accept_index"].shape[1]
        path = wide(np.asarray(verdict.path), columns)
        block = wide(emitted(proposal, verdict), columns)
        equal(name, "num_correct_drafts", verdict.accept_length, case["num_correct_drafts"])
        equal(name, "accept_lens", np.sum(path >= 0, axis=1), case["accept_lens"])
        equal(name, "accept_index", in_one_row(path, nodes), case["accept_index"])
        equal(name, "accept_tokens", block, case["accept_tokens"])
        equal(name, "bonus_tokens", verdict.bonus, case["bonus_tokens"])
        visited = predicted(path, block, nodes)
        equal(
            name,
            "predict",
            visited,
            np.where(predicted(path, np.ones_like(block), nodes), case["predict"], 0),
        )


def run_tree_sampling(folder: Path) -> None:
    """`b_tree_sampling_target_only` where both thresholds are 1: lower ones do not follow the target."""
    arrays = load_file(folder / "b_tree_sampling_target_only.safetensors")
    metas = json.loads((folder / "b_tree_sampling_target_only.json").read_text())
    exact = [meta for meta in metas if meta["threshold_single"] == meta["threshold_acc"] == 1]
    for meta in exact:
        tree, _, proposal, _ = trees(folder)[meta["tree_case"]]
        name, nodes = f"s{meta['id']}", tree["num_draft_tokens"]
        case = fields(arrays, name)
        with np.errstate(divide="ignore"):
            logits = np.log(case["target_probs"])
        coins = Coins(accept=jnp.asarray(case["coins"][:, :-1]), bonus=jnp.asarray(case["coin_final"]))
        verdict = judge(proposal, logits, temperature=1, coins=coins)
        columns = case["accept_index"].shape[1]
        path = wide(np.asarray(verdict.path), columns)
        block = wide(emitted(proposal, verdict), columns)
        equal(name, "num_correct_drafts", verdict.accept_length, case["num_correct_drafts"])
        equal(name, "accept_index", in_one_row(path, nodes), case["accept_index"])
        touched = predicted(path, np.ones_like(block), nodes) > 0
        equal(name, "predict", predicted(path, block, nodes)[touched], case["predict"][touched])


class Automaton:
    """A toy grammar: transitions by token, complete in its final state."""

    def __init__(self, item: dict, vocabulary: int):
        self.transitions, self.final, self.states = item["transitions"], item["final"], [item["start"]]
        self.words = -(-vocabulary // 32)

    def allowed(self) -> np.ndarray | None:
        if self.states[-1] == self.final:
            return None
        row = np.zeros((self.words,), np.uint32)
        for token in map(int, self.transitions[self.states[-1]]):
            row[token // 32] |= np.uint32(1 << (token % 32))
        return row.view(np.int32)

    def accept(self, token: int) -> None:
        self.states.append(self.transitions[self.states[-1]][str(token)])

    def rollback(self, count: int) -> None:
        del self.states[-count:]


def run_grammar_tree(folder: Path) -> None:
    """`x_grammar_tree`: what a grammar allows after every node."""
    items = json.loads((folder / "x_grammar_tree.json").read_text())
    assert items, "x_grammar_tree: no case in the file"
    for item in items:
        meta, _, proposal, _ = trees(folder)[item["tree_case"]]
        name, row = f"tree {item['tree_case']} row {item['row']}", item["row"]
        vocabulary = meta["vocab"]
        matcher = Automaton(item, vocabulary)
        masks = np.full((meta["num_draft_tokens"], matcher.words), -1, np.int32)
        fill_allowed(
            matcher, np.asarray(proposal.tokens)[row].tolist(), parents_of(proposal)[row].tolist(), masks
        )
        equal(name, "states after the walk", matcher.states, [item["start"]])
        for node, allowed in enumerate(item["allowed"]):
            bits = np.unpackbits(masks[node].astype("<i4").view(np.uint8), bitorder="little")[:vocabulary]
            unfilled = isinstance(allowed, str)
            expected = np.ones(vocabulary) if unfilled else np.isin(np.arange(vocabulary), allowed)
            equal(name, f"allowed after node {node}", bits, expected)
