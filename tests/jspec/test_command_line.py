"""What `jspec COMMAND` does with an error, whatever the command."""

import sys
import types

import pytest

from jspec import cli


@pytest.fixture
def command(monkeypatch):
    """A command that raises what it is told to."""
    module = types.ModuleType("planted_command")
    monkeypatch.setitem(sys.modules, "planted_command", module)
    monkeypatch.setitem(cli.COMMANDS, "planted", ("planted_command:planted", "Raises."))

    def plant(problem):
        def planted() -> None:
            raise problem

        module.planted = planted

    return plant


@pytest.mark.parametrize(
    ("problem", "shown"),
    [
        (ValueError("top_p: expected a number, got 2; use 1"), "top_p: expected a number, got 2; use 1"),
        (ValueError("rows.jsonl:3: expected one"), "rows.jsonl:3: expected one"),
        (
            FileNotFoundError(2, "No such file", "gone"),
            "FileNotFoundError: [Errno 2] No such file: 'gone' (--traceback",
        ),
        (
            RuntimeError("out of memory\n  on line 2"),
            "RuntimeError: out of memory on line 2 (--traceback shows where)",
        ),
        (TypeError("got 3 arguments"), "TypeError: got 3 arguments (--traceback shows where)"),
    ],
)
def test_errors_of_a_user_are_one_line_and_exit_with_2(command, capsys, problem, shown):
    command(problem)
    with pytest.raises(SystemExit) as exit_:
        cli.main(["planted"])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"jspec planted: {shown}")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["planted", "--traceback"], ["--traceback", "planted"]])
def test_traceback_shows_where_an_error_was_raised(command, arguments):
    command(ValueError("planted"))
    with pytest.raises(ValueError, match="planted"):
        cli.main(arguments)


def test_faults_of_the_program_are_not_hidden(command):
    command(KeyError("planted"))
    with pytest.raises(KeyError):
        cli.main(["planted"])


def test_an_interrupt_ends_quietly(command, capsys):
    command(KeyboardInterrupt())
    with pytest.raises(SystemExit) as exit_:
        cli.main(["planted"])
    assert exit_.value.code == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_missing_package_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(cli.COMMANDS, "planted", ("no_such_package.module:f", "Needs a package."))
    with pytest.raises(SystemExit) as exit_:
        cli.main(["planted"])
    assert exit_.value.code == 2
    assert (
        "expected the package no_such_package, got none; pip install 'jspec[cli]'" in capsys.readouterr().err
    )


def test_a_module_of_ours_that_is_missing_is_a_fault(monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "planted", ("jspec.no_such_module:f", "Is not there."))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["planted"])


def test_an_unknown_command_lists_those_that_there_are(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["nonsense"])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert "got 'nonsense'" in error
    assert all(name in error for name in cli.COMMANDS)
