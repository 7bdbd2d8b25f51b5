"""Cases are told apart by what is in them: other names change nothing."""

import json
import re
import shutil
from pathlib import Path

from conformance.cases import discover
from conformance.training_records import SHARING

CASES = Path(__file__).parent / "cases"


def test_renamed_cases_keep_their_checks(tmp_path):
    names = {path.name: f"case{i}" for i, path in enumerate(sorted((CASES / "train").iterdir()))}
    for old, new in names.items():
        shutil.copytree(CASES / "train" / old, tmp_path / "train" / new)
    for new in names.values():
        meta = tmp_path / "train" / new / "meta.json"
        values = json.loads(meta.read_text())
        for key, value in values.items():
            if re.fullmatch(SHARING, key):
                # Longest names first: one may begin with another.
                for old in sorted(names, key=len, reverse=True):
                    value = value.replace(old, names[old])
                values[key] = value
        meta.write_text(json.dumps(values))
    known, unknown = discover(tmp_path)
    before = {case.name: case.check for case in discover(CASES)[0]}
    assert {case.name: case.check for case in known} == {names[old]: before[old] for old in names}
    assert not unknown
