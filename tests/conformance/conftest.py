from pathlib import Path

from conformance.cases import discover

HERE = Path(__file__).parent


def folder_of(config) -> Path:
    return Path(config.getoption("--cases") or HERE / "cases")


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases, _ = discover(folder_of(metafunc.config))
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])


def pytest_terminal_summary(terminalreporter, config):
    folder = folder_of(config)
    cases, unknown = discover(folder)
    terminalreporter.section(f"conformance cases in {folder}")
    terminalreporter.line(f"known kinds ({len(cases)}): {', '.join(case.name for case in cases)}")
    terminalreporter.line(f"kinds not supported yet ({len(unknown)}): {', '.join(unknown) or 'none'}")
