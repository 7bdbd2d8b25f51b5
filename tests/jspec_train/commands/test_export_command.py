from jspec_train.commands.export import texts_beside


def test_an_index_of_shards_is_not_taken_along_into_one_file(tmp_path):
    for name in ("config.json", "model.safetensors.index.json", "training.json"):
        (tmp_path / name).write_text("{}")
    assert texts_beside(tmp_path) == {"training.json": "{}"}
