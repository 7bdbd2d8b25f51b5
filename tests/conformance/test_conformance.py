"""Golden arrays made with the public implementations; `--cases DIR` runs others of the same kinds."""

from conformance.cases import Case


def test_case(case: Case):
    case.check(case.folder)
