import pytest
from contract.engines import engine

from jspec.drafters.ngram import ngram
from jspec.drafters.tree_shape import chain_shape
from jspec.loading import resolve, resolve_drafter, with_drafter


def test_second_engine_has_the_sizes_of_the_first():
    first = engine(
        "plain", max_slots=3, max_context=30, page_size=5, cache_tokens=40, chunks=(3, 6), max_stop_ids=2
    )
    second = with_drafter(first, "ngram", draft_length=2)
    assert second.free_pages == first.free_pages == (8,)
    assert (second.page_size, second.cache_tokens, second.ladder.chunks) == (5, 40, (3, 6))
    assert (second.max_slots, second.max_context, second.max_stop_ids) == (3, 30, 2)
    assert second.method.drafter.draft_length == 2


def test_trees_of_the_ngram_drafter_have_a_name():
    first = engine("plain")
    drafter = with_drafter(first, "ngram-tree", draft_length=3).method.drafter
    assert (drafter.name, drafter.draft_depth, drafter.draft_length) == ("ngram-tree", 3, 12)
    with pytest.raises(ValueError, match='tree: expected None with drafter "ngram-tree", got DynamicTree'):
        with_drafter(first, "ngram-tree", tree=chain_shape(2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plain", (), 3), 'draft_length: expected None with drafter "plain", got 3'),
        ((ngram(), (), 3), "draft_length: expected None with a Drafter object"),
        (("ngram", (1.0,), None), "drafter_params: expected none with drafter 'ngram', got tuple"),
    ],
)
def test_arguments_that_a_drafter_has_no_use_for_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        resolve_drafter(*arguments, "float32", None)


@pytest.mark.parametrize("drafter", ["plain", "ngram", ngram()], ids=["plain", "ngram", "object"])
def test_tree_is_for_checkpoints_that_draft_one(drafter):
    with pytest.raises(ValueError, match="tree: expected None with"):
        resolve_drafter(drafter, (), None, "float32", None, tree=chain_shape(2))


def test_hub_id_that_does_not_resolve_gives_one_error_of_ours(monkeypatch):
    import huggingface_hub

    def fails(name, **options):
        raise ConnectionError(f"cannot reach {name}\nand much more text")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    for named, call in (
        ("model", lambda: resolve("nobody/nothing")),
        ("drafter", lambda: resolve_drafter("nobody/nothing", (), None, "float32", None)),
    ):
        with pytest.raises(FileNotFoundError) as error:
            call()
        assert str(error.value) == (
            f"{named}: expected a path that exists or a hub id that can be fetched, got 'nobody/nothing' "
            "(ConnectionError: cannot reach nobody/nothing); check the name, the network and your access"
        )


def test_hub_id_is_fetched(monkeypatch, tmp_path):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path / name))
    assert resolve("some-body/Model-1.5B") == tmp_path / "some-body/Model-1.5B"


@pytest.mark.parametrize("name", ["gone", "a/b/c", "./a/b", "/a/b", "~/b", "a b/c", "folder/model.gguf", ""])
def test_path_that_is_no_hub_id_is_not_asked_for(name, monkeypatch):
    import huggingface_hub

    def asked(*_, **__):
        raise AssertionError(f"{name!r} was looked up")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", asked)
    with pytest.raises(FileNotFoundError, match=r"^model: expected a folder, a \.gguf file or a hub id, got"):
        resolve(name)
