"""The page at /, in a real browser."""

import os
import re
import shutil
import time

import pytest
from contract.engines import engine as table_engine
from contract.words import words_tokenizer
from served import line, serving

from jspec_serve.page import FOLDER

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Nothing but this machine may be asked; some machines refuse the rest one by one, slowly.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as running:
        one = running.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield one
        one.close()


@pytest.fixture
def page(browser, served):
    with browser.new_context(viewport={"width": 1280, "height": 860}) as context:
        one = context.new_page()
        one.set_default_timeout(20_000)
        problems: list[str] = []
        one.on("pageerror", lambda problem: problems.append(str(problem)))
        one.on("console", lambda said: said.type == "error" and problems.append(said.text))
        one.goto(served.url)
        yield one
        assert [text for text in problems if "400" not in text] == []


@pytest.fixture(scope="module")
def partly():
    """An engine whose drafter's first token is right and whose others are wrong."""
    return table_engine("cut1", tokenizer=words_tokenizer(), max_slots=1)


def ask(page, text="two three", tokens=40):
    page.get_by_label("Tokens", exact=True).fill(str(tokens))
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def test_both_answers_and_where_their_tokens_came_from(page):
    ask(page)
    page.locator(".verdict", has_text="the same 40 tokens").wait_for()
    drafted, plain = page.locator(".answer").all()
    for one in (drafted, plain):
        words = "".join(one.locator(".text .token").all_text_contents())
        assert words == line(7, 40)
    # The drafter is always right: each round but the prompt's has three draft tokens and one of the target's.
    assert drafted.locator(".token.drafted").count() == 29
    assert plain.locator(".token.drafted").count() == 0
    assert drafted.locator(".round").count() == 10
    assert plain.locator(".round").count() == 39
    assert drafted.locator(".round").first.get_attribute("title") == "verified 3, accepted 3"
    assert "accepted 29 of 29" in drafted.locator(".numbers").inner_text()
    assert "the request turned it off" in plain.locator(".numbers").inner_text()
    if folder := os.environ.get("JSPEC_SCREENSHOTS"):
        page.wait_for_timeout(2500)
        page.screenshot(path=f"{folder}/page.png")


def test_a_chat_goes_on(page):
    page.get_by_label("plain decoding beside it").uncheck()
    ask(page, tokens=5)
    page.locator(".answer:not(.running)").nth(0).wait_for()
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "one", tokens=5)
    assert [message["content"] for message in asked.value.post_data_json["messages"]] == [
        "two three",
        line(7, 5),
        "one",
    ]
    page.locator(".answer:not(.running)").nth(1).wait_for()


def test_new_chat_during_an_answer_forgets_the_old_one(page, served, braked):
    braked.engage()
    ask(page)
    braked.step(2)
    page.locator(".answer .token").first.wait_for()
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("button", name="Send").wait_for()
    braked.release()
    assert page.locator(".answer").count() == 0
    assert page.get_by_label("Message").input_value() == ""
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "one", tokens=5)
    assert [message["content"] for message in asked.value.post_data_json["messages"]] == ["one"]
    page.locator(".verdict", has_text="the same 5 tokens").wait_for()


@pytest.mark.parametrize(
    ("drafted", "plain", "said"),
    [
        ([1, 2, 3], [1, 2, 3], "the same 3 tokens"),
        ([1, 2, 3], [1, 7, 3], "but other tokens from number 2 on"),
        ([1, 2], [1, 2, 3], "but other tokens from number 3 on"),
        ([1, 2, 3], [1, 2], "but other tokens from number 3 on"),
    ],
)
def test_verdict_tells_where_answers_part(page, drafted, plain, said):
    code = "([a, b]) => import('/web/answer.js').then(({ verdict }) => verdict({ ids: a }, { ids: b }).textContent)"
    assert page.evaluate(code, [drafted, plain]) == said


def test_errors_of_the_api_are_shown_and_the_question_is_kept(page):
    ask(page, tokens=100)
    said = page.get_by_role("alert")
    said.wait_for()
    assert "max_tokens: expected at most 61" in said.inner_text()
    assert page.get_by_label("Message").input_value() == "two three"
    ask(page, tokens=5)
    page.locator(".verdict", has_text="the same 5 tokens").wait_for()
    assert not said.is_visible()


def test_rejected_draft_tokens_are_marked(page, partly):
    with serving(partly) as one:
        page.goto(one.url)
        ask(page, tokens=10)
        page.locator(".verdict", has_text="the same 10 tokens").wait_for()
        assert page.locator(".answer .rejected").first.inner_text() == "2"
        page.goto("about:blank")


def test_escape_stops_an_answer_and_frees_its_slot(page, served, braked):
    braked.engage()
    ask(page)
    braked.step(2)
    page.locator(".answer .token").first.wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Send").wait_for()
    braked.release()
    deadline = time.monotonic() + 30
    while served.service.thread.unfinished:
        assert time.monotonic() < deadline
        page.wait_for_timeout(20)
    assert not page.get_by_role("alert").is_visible()


def test_charts_show_load_and_acceptance(page):
    page.locator("figure").nth(4).wait_for()
    ask(page)
    page.locator(".verdict", has_text="the same 40 tokens").wait_for()
    captions = page.locator("figcaption")
    captions.nth(4).filter(has_text=re.compile(r"100% 100% \d+%")).wait_for()
    assert page.locator("figure").nth(4).locator("rect").count() == 3
    assert (
        page.locator("svg.chart path").count() == 3 * 2 + 3
    )  # an area and a line each, and waiting requests
    assert "Tokens generated" in page.locator("#facts").inner_text()


def test_a_key_is_asked_for(browser, partly):
    with serving(partly, api_key="secret") as one, browser.new_context() as context:
        page = context.new_page()
        page.goto(one.url)
        page.get_by_label("API key").fill("secret")
        page.keyboard.press("Enter")
        page.get_by_text("table ·").wait_for()
        ask(page, tokens=5)
        page.locator(".verdict", has_text="the same 5 tokens").wait_for()
        page.goto("about:blank")


def test_page_works_with_the_keyboard_alone_and_without_the_network(page):
    page.keyboard.type("two three")  # the message has the focus
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "send"
    names = [page.evaluate("document.activeElement.id")]
    for _ in range(6):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.id"))
    assert names == ["send", "new", "max-tokens", "temperature", "seed", "draft-length", "compare"]


def test_what_the_page_loads_is_served_with_its_type_and_nothing_else_is(served):
    with served.client() as client:
        reply = client.get("/")
        assert reply.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'self'" in reply.headers["content-security-policy"]
        types = {
            path.name: client.get(f"/web/{path.name}").headers["content-type"] for path in FOLDER.iterdir()
        }
        assert types["page.js"].startswith("text/javascript")
        assert types["page.css"].startswith("text/css")
        assert client.get("/web/..%2fpage.py").status_code == 404
        assert client.get("/web/other.js").status_code == 404
