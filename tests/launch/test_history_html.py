"""The history page: the contents of the file, and the page in a browser."""

import html.parser
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from launch.display.history_html import HistoryRow, HistoryToken, render_history_html, write_history_html
from tests.launch.browser import chromium, chromium_path

EXECUTED = "document.documentElement.dataset.executed='yes'"
HOSTILE = f'</script></title><img src=x onerror="{EXECUTED}"><script>{EXECUTED}</script><!-- {{{{data}}}} &amp;'


def small_row(title="prompt 0"):
    words = ["def ", "f", "():\n", "    return", " 1", "\n"]
    steps = [-1, -1, 0, 3, 1, 2]
    tokens = [HistoryToken(word, step) for word, step in zip(words, steps, strict=True)]
    return HistoryRow(title, [*tokens, HistoryToken("<|mask|>", None), *[HistoryToken("<|end|>", 3, end=True)] * 5], 4)


def hostile_row():
    texts = [HOSTILE, "\x00\x1b[31m", "\u202eevil", "", "你好 😀", "\ufffd", "\ud800", "a\tb\r\n\n  c", "\u2028", "]]>"]
    return HistoryRow(HOSTILE, [HistoryToken(text, number % 4) for number, text in enumerate(texts)], 4)


def hostile_page():
    return render_history_html([hostile_row()], title=HOSTILE, settings={HOSTILE: HOSTILE})


class Elements(html.parser.HTMLParser):
    """Collects every tag with its attributes and the text after it."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes), []))

    def handle_endtag(self, tag):
        self.found.append((f"/{tag}", {}, []))

    def handle_data(self, data):
        if self.found:
            self.found[-1][2].append(data)


def elements(page):
    parser = Elements()
    parser.feed(page)
    return [(tag, attributes, "".join(text)) for tag, attributes, text in parser.found]


def embedded(page):
    [data] = [text for tag, attributes, text in elements(page) if attributes.get("id") == "data"]
    return json.loads(data)


def test_the_data_comes_back_as_it_went_in():
    row, hostile = small_row(), hostile_row()
    data = embedded(render_history_html([row, hostile], title=HOSTILE, settings={"2": HOSTILE, "1": "ü"}))
    assert data["title"] == HOSTILE
    assert data["settings"] == [["2", HOSTILE], ["1", "ü"]]
    for given, got in zip([row, hostile], data["rows"], strict=True):
        assert (got["title"], got["steps"]) == (given.title, given.steps)
        assert [HistoryToken(text, step, bool(end)) for text, step, end in got["tokens"]] == given.tokens


def test_hostile_text_adds_no_element():
    benign = render_history_html([small_row()], title="t", settings={"a": "b"})
    page = hostile_page()
    assert [tag for tag, _, _ in elements(page)] == [tag for tag, _, _ in elements(benign)]
    [title] = [text for tag, _, text in elements(page) if tag == "title"]
    assert title == HOSTILE
    [data] = [text for _, attributes, text in elements(page) if attributes.get("id") == "data"]
    assert "<" not in data
    page.encode("utf-8")


def test_nothing_is_asked_of_the_network():
    page = hostile_page()
    for tag, attributes, _ in elements(page):
        assert not {"src", "href", "srcset", "action", "style"} & set(attributes), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")]
    source = (Path(__file__).parents[2] / "launch" / "display" / "history.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|@import|url\(|innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", source)
    [policy] = [attributes["content"] for _, attributes, _ in elements(page) if "http-equiv" in attributes]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


@pytest.mark.parametrize("step", [-2, 4, 99])
def test_a_step_outside_of_the_run_is_an_error(step):
    with pytest.raises(ValueError, match=rf"'title', position 1: step is {step}; expected -1 to 3"):
        HistoryRow("title", [HistoryToken("a", 0), HistoryToken("b", step)], 4)
    with pytest.raises(ValueError, match="at least 1"):
        HistoryRow("title", [], 0)


def test_writing_replaces_the_whole_file(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("old " * 100_000)
    write_history_html(path, [small_row()], title="new", settings={})
    assert path.read_text(encoding="utf-8") == render_history_html([small_row()], title="new", settings={})
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.skipif(os.name != "posix", reason="file permissions of POSIX")
def test_the_file_gets_a_new_files_permissions(tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    write_history_html(tmp_path / "page.html", [], title="", settings={})
    assert (tmp_path / "page.html").stat().st_mode == plain.stat().st_mode


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("old")

    def full(self, target):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        write_history_html(path, [small_row()], title="new", settings={})
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        write_history_html(tmp_path / "missing" / "page.html", [], title="", settings={})


# ---- in a browser -------------------------------------------------------------------------------------------------


def browse(tmp_path, path, fragment=""):
    """Return the page's elements after its script has run."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    options += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path / 'user'}"]
    command = [chromium_path(), *options, "--dump-dom", path.as_uri() + fragment]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    return elements(done.stdout.decode("utf-8"))


def classes(found):
    return [attributes["class"].split() for tag, attributes, _ in found if tag == "span" and "class" in attributes]


def text_of(found, tag):
    return [text for name, _, text in found if name == tag]


@pytest.mark.slow
class TestBrowser:
    @pytest.mark.parametrize(
        ("fragment", "step", "masked", "now", "output"),
        [
            ("#step=0", "0", 10, 0, "step 0 of 4"),
            ("#step=2", "2", 8, 1, "step 2 of 4"),
            ("#step=4", "4", 1, 0, "finished, 4 steps"),
            ("#step=77", "4", 1, 0, "finished, 4 steps"),
            ("#nonsense", "0", 10, 0, "step 0 of 4"),
        ],
    )
    def test_the_address_sets_the_step(self, tmp_path, fragment, step, masked, now, output):
        path = tmp_path / "page.html"
        write_history_html(path, [small_row()], title="A page", settings={"mesh": "tensor=2"})
        found = browse(tmp_path, path, fragment)
        assert found[0][1]["data-step"] == step
        assert text_of(found, "output") == [output]
        [slider] = [attributes for tag, attributes, _ in found if tag == "input"]
        assert slider["max"] == "4"
        assert slider["aria-valuetext"] == f"{step} of 4 steps done"
        tokens = [names for names in classes(found) if "token" in names]
        assert len(tokens) == 12
        assert sum("masked" in names for names in tokens) == masked
        assert sum("now" in names for names in tokens) == now
        # End tokens are folded into one button.
        [end] = [text for tag, attributes, text in found if tag == "button" and attributes.get("class") == "end"]
        assert end.encode("ascii", "replace") == (b"end ? 5" if step == "4" else b"end ? 5, 0 set")
        assert text_of(found, "h1") == ["A page"]
        assert text_of(found, "dd") == ["tensor=2"]

    def test_it_opens_at_the_first_step_and_plays(self, tmp_path):
        path = tmp_path / "page.html"
        write_history_html(path, [small_row()], title="A page", settings={})
        with chromium() as browser:
            page = browser.new_page()
            page.goto(path.as_uri())
            page.wait_for_selector("html[data-step='4']")
            assert page.inner_text("output") == "finished, 4 steps"
            still = browser.new_context(reduced_motion="reduce").new_page()
            still.goto(path.as_uri())
            still.wait_for_timeout(2000)
            assert still.inner_text("output") == "step 0 of 4"

    def test_nothing_overflows_on_a_narrow_or_a_wide_screen(self, tmp_path):
        path = tmp_path / "page.html"
        settings = {"mesh": "data=2,sequence=2,tensor=2", "a_long_name_of_a_setting_that_has_no_space": "x" * 80}
        write_history_html(
            path, [small_row(), hostile_row()], title="A page of " + "a_long_name" * 8, settings=settings
        )
        with chromium() as browser:
            colours = {}
            for width in (360, 1280):
                for scheme in ("light", "dark"):
                    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
                    page.goto(f"{path.as_uri()}#step=2")
                    assert page.evaluate("document.documentElement.scrollWidth") <= width
                    style = "getComputedStyle(document.body)"
                    colours[scheme] = page.evaluate(f"[{style}.backgroundColor, {style}.color]")
            assert colours == {
                "light": ["rgb(251, 251, 250)", "rgb(23, 24, 28)"],
                "dark": ["rgb(18, 19, 23)", "rgb(242, 242, 239)"],
            }

    def test_all_masks_have_the_width_of_three_digits(self, tmp_path):
        """Widths do not reveal the words behind masks; tokens have the same monospaced font."""
        path = tmp_path / "page.html"
        write_history_html(path, [small_row()], title="A page", settings={})
        with chromium() as browser:
            page = browser.new_page()
            page.goto(f"{path.as_uri()}#step=0")
            found = page.eval_on_selector_all(".masked", "all => all.map(one => one.getBoundingClientRect().width)")
            widths = [width for width in found if width]  # those of folded end tokens are 0
            assert len(widths) >= 5
            digit = page.evaluate(
                """() => {
                  const line = document.createElement("span");
                  line.textContent = "0".repeat(30);
                  document.querySelector("pre").append(line);
                  return line.getBoundingClientRect().width / 30;
                }"""
            )
            assert set(map(round, widths)) == {round(3 * digit)}
            families = page.eval_on_selector_all(".token", "all => all.map(one => getComputedStyle(one).fontFamily)")
            assert all(family.endswith("monospace") for family in families)

    def test_a_hostile_prompt_stays_text(self, tmp_path):
        path = tmp_path / "page.html"
        row = hostile_row()
        write_history_html(path, [row, small_row(HOSTILE)], title=HOSTILE, settings={HOSTILE: HOSTILE})
        found = browse(tmp_path, path, "#step=4")
        assert found[0][1] == {"lang": "en", "data-step": "4"}  # only the page's own script ran
        assert "img" not in [tag for tag, _, _ in found]
        assert len(text_of(found, "script")) == 2
        for tag in ("h1", "dt", "dd"):
            assert text_of(found, tag) == [HOSTILE]
        assert text_of(found, "h2") == [HOSTILE, HOSTILE]
        shown = "".join(text for _, _, text in found)
        assert "\u202e" not in shown
        assert "⟨U+202E⟩evil" in shown
        assert "␀␛[31m" in shown
        assert "你好 😀" in shown
