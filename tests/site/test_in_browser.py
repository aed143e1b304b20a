"""The pages in Chromium, wide and narrow, light and dark: those of the site, and those that the library writes."""

import functools
import http.server
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, Request, ViewportSize, sync_playwright

from shardwise._layout import Layout, Mesh, Shard
from shardwise.embedding import EmbeddingBagConfig
from shardwise.plan import BatchShape, Topology, plan_tables
from tests.browser import BROWSER
from tests.timeouts import PATIENCE_SECONDS

pytestmark = [pytest.mark.processes, pytest.mark.browser]

Scheme = Literal["light", "dark"]
WINDOWS = {"wide": (1400, 900), "narrow": (390, 844)}
# Sizes and colours come from style rules of their own, so two looks show both of each.
LOOKS = [
    pytest.param(WINDOWS["wide"], "light", id="wide-light"),
    pytest.param(WINDOWS["narrow"], "dark", id="narrow-dark"),
]
PAGES = ("index", "performance", "coming-from-torch", "debugging", "reference/parallel")
# Of every picture: its size on the screen, and whether it was loaded.
PICTURES = """() => [...document.querySelectorAll("img, svg:not(.md-icon *, button *, label *, nav *, a *)")]
    .filter(each => each.checkVisibility())
    .map(each => [each.outerHTML.slice(0, 80), each.getBoundingClientRect().width, each.getBoundingClientRect().height,
                  each.complete !== false && each.naturalWidth !== 0])"""
# The relative luminance of the text and of what is behind it, by WCAG 2.2.
LUMINANCE = """() => {
    const of = text => {
        const [r, g, b, a] = [...text.matchAll(/[\\d.]+/g)].map(Number)
        const linear = x => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4
        return a === 0 ? null : 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b)
    }
    const heading = document.querySelector("p, td, h1")
    let behind = heading
    while (behind && of(getComputedStyle(behind).backgroundColor) === null) behind = behind.parentElement
    return [of(getComputedStyle(heading).color), behind ? of(getComputedStyle(behind).backgroundColor) : 1]
}"""


# The least contrast of a text with what is behind it, and the texts that are not seen in full.
TEXTS = """() => {
    const of = text => [...text.matchAll(/[\\d.]+/g)].map(Number)
    const over = ([r, g, b, a = 1], below) => [r, g, b].map((x, i) => a * x + (1 - a) * below[i])
    const linear = x => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4
    const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b)
    const behind = x => x ? over(of(getComputedStyle(x).backgroundColor), behind(x.parentElement)) : [255, 255, 255]
    const every = document.querySelectorAll("h1, h2, p, dt, dd, li, span, td, th, caption")
    const texts = [...every].filter(x => x.textContent)
    const contrasts = texts.map(each => {
        const below = behind(each), pair = [below, over(of(getComputedStyle(each).color), below)].map(luminance)
        return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05)
    })
    const edge = each => each.closest("table") ? each.clientWidth : innerWidth
    const hidden = texts.filter(x => x.scrollWidth > Math.min(edge(x), x.clientWidth || Infinity) + 1)
    return [Math.min(...contrasts), hidden.map(x => x.textContent)]
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, timeout=PATIENCE_SECONDS * 1000)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@contextmanager
def window(browser: Browser, size: tuple[int, int], scheme: Scheme, base: str) -> Iterator[Page]:
    """A window whose pages may complain of nothing, and load only what is below `base`."""
    viewport: ViewportSize = {"width": size[0], "height": size[1]}
    page = browser.new_page(viewport=viewport, color_scheme=scheme)
    page.set_default_timeout(PATIENCE_SECONDS * 1000)
    complaints = list[str]()

    def failed(request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # by the next page, which may be opened before a script has come
            complaints.append(f"not loaded: {request.url}")

    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", failed)
    page.on(
        "response", lambda answer: complaints.append(f"{answer.status}: {answer.url}") if answer.status >= 400 else None
    )
    page.on("request", lambda asked: None if asked.url.startswith((base, "data:")) else complaints.append(asked.url))
    yield page
    page.close()
    assert complaints == []


def check(page: Page, scheme: Scheme | None = None) -> int:
    """That a page has a heading, fits the window, and can be read; returns how many pictures are seen."""
    assert page.locator("h1").first.is_visible()
    width, height = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
    assert width <= page.evaluate("innerWidth"), page.url
    assert height > 100
    text, behind = page.evaluate(LUMINANCE)
    brighter, darker = max(text, behind), min(text, behind)
    assert (brighter + 0.05) / (darker + 0.05) >= 4.5, page.url
    assert scheme is None or (behind > 0.5) == (scheme == "light"), page.url
    page.evaluate("document.querySelectorAll('img').forEach(each => each.loading = 'eager')")
    page.wait_for_function("[...document.images].every(each => each.complete)")
    pictures: Sequence[tuple[str, float, float, bool]] = page.evaluate(PICTURES)
    assert [each for each in pictures if not (each[1] > 0 and each[2] > 0 and each[3])] == [], page.url
    return len(pictures)


@pytest.mark.parametrize(("size", "scheme"), LOOKS)
def test_pages_can_be_read(browser: Browser, address: str, size: tuple[int, int], scheme: Scheme) -> None:
    pictures = {}
    with window(browser, size, scheme, address) as page:
        for name in PAGES:
            page.goto(f"{address}{name}.html")
            pictures[name] = check(page, scheme)
    assert pictures["performance"] == 1


def test_every_guide_fits_a_narrow_window(browser: Browser, address: str, site: Path) -> None:
    names = {file.name for file in site.glob("*.html")} - {"404.html", *(f"{name}.html" for name in PAGES)}
    assert len(names) > 20
    with window(browser, WINDOWS["narrow"], "light", address) as page:
        for name in names:
            page.goto(f"{address}{name}")
            check(page, "light")


@pytest.mark.parametrize("size", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("place", ["server", "disk"])
def test_the_search_finds_pages(browser: Browser, address: str, site: Path, size: tuple[int, int], place: str) -> None:
    base = address if place == "server" else f"{site.as_uri()}/"
    with window(browser, size, "light", base) as page:
        for words, end in (("loss parallelism", "#loss-parallelism"), ("shard_module", "#shardwise.shard_module")):
            page.goto(f"{base}index.html")
            if size == WINDOWS["narrow"]:
                page.locator(".md-header__button[for=__search]").click()
            page.locator(".md-search__input").press_sequentially(words)
            page.locator(f".md-search-result__link[href$='{end}']").first.click()
            page.wait_for_url(f"**{end}")
            check(page)


# What people type, and the page that must come first.
FIRST = {
    "out of memory": "memory", "OOM": "memory", "activation checkpointing": "memory", "cpu offload": "memory",
    "bf16": "mixed-precision", "mixed precision": "mixed-precision", "gradient accumulation": "mixed-precision",
    "GradScaler": "mixed-precision", "LoRA": "lora", "PEFT": "lora", "generate": "generation", "serving": "generation",
    "pipeline parallel": "not-here", "torch.compile": "capture", "fp8": "not-here", "UVM": "not-here",
    "windows": "not-here", "GPU": "gpus", "NCCL": "gpus", "tensorboard": "metrics", "wandb": "metrics",
    "MFU": "metrics", "slurm": "launching", "kubernetes": "launching", "elastic": "launching", "torchrun": "start",
    "jupyter": "launching", "KJT": "embedding", "embedding bag": "embedding", "table planner": "embedding",
    "FSDP": "data-parallel", "ZeRO": "data-parallel", "DDP": "data-parallel", "tensor parallel": "parallel",
    "sequence parallel": "parallel", "mixture of experts": "parallel", "weight tying": "parallel",
    "ring attention": "parallel", "resume": "checkpoints", "deadlock": "debugging", "simulate": "pictures",
    "uneven": "glossary", "TorchRec": "coming-from-torchrec", "Megatron": "coming-from-torch",
    "safetensors": "checkpoint-tools", "shard_module": "reference/shardwise", "checkpoint": "checkpoints",
    "checkpoint convert": "checkpoint-tools", "multi node": "launching", "freeze layers": "lora",
    "NaN loss": "troubleshooting", "custom op": "coverage",
    "shard a big linear": "parallel", "quantization": "not-here", "gather full tensor": "glossary",
}  # fmt: skip


def test_the_first_result_of_words_that_people_type(browser: Browser, address: str) -> None:
    found = {}
    with window(browser, WINDOWS["wide"], "light", address) as page:
        page.goto(f"{address}index.html")
        for words in FIRST:
            page.locator(".md-search__input").fill("")
            page.wait_for_function("document.querySelectorAll('.md-search-result__link').length === 0")
            page.locator(".md-search__input").press_sequentially(words)
            first = page.locator(".md-search-result__link").first
            first.wait_for()
            page.wait_for_timeout(200)  # milliseconds: each key is a search
            found[words] = str(first.evaluate("each => each.href")).removeprefix(address).split(".html")[0]
    assert found == FIRST


def test_colours_can_be_chosen(browser: Browser, address: str) -> None:
    with window(browser, WINDOWS["wide"], "light", address) as page:
        page.goto(f"{address}index.html")
        page.get_by_title("Use dark colours").click()
        check(page, "dark")
        page.goto(f"{address}glossary.html")
        check(page, "dark")


@pytest.mark.parametrize(("size", "scheme"), LOOKS)
def test_notebook_drawings_can_be_read(browser: Browser, tmp_path: Path, size: tuple[int, int], scheme: Scheme) -> None:
    layouts = (
        Layout(Mesh((2, 2)), [Shard(0), Shard(1)], (9, 7)),
        Layout(Mesh((2, 2), names=("dp", "tp")), [Shard(0), Shard(1)], (1000, 64)),
        Layout(Mesh((3,)), [Shard(0, [10, 30, 24])], (64, 8)),
    )
    drawings = "".join(layout._repr_html_() for layout in layouts)
    file = tmp_path / "notebook.html"
    file.write_text(f"<!doctype html><meta charset=utf-8><title>notebook</title><h1>Notebook</h1>{drawings}", "utf-8")
    with window(browser, size, scheme, f"{tmp_path.as_uri()}/") as page:
        page.goto(file.as_uri())
        assert check(page) == len(layouts)


@pytest.mark.parametrize(("size", "scheme"), LOOKS)
def test_the_page_of_a_plan_can_be_read_and_sorted(
    browser: Browser, tmp_path: Path, size: tuple[int, int], scheme: Scheme
) -> None:
    names = ["<script>", "t2", "t10", "users of the last year, and what each of them has bought" * 3]
    rows = dict(zip(names, (700, 90, 4000, 1_000_000), strict=True))
    tables = [EmbeddingBagConfig(n, 16, name, feature_names=[name]) for name, n in rows.items()]
    plan = plan_tables(tables, Topology.preset("cpu"), BatchShape(64), allowed={"t2": ["table"]})
    file = tmp_path / "plan.html"
    file.write_text(plan.to_html(), "utf-8")

    with window(browser, size, scheme, file.as_uri()) as page:
        page.goto(file.as_uri())
        assert check(page) > 2 * plan.ranks
        contrast, hidden = page.evaluate(TEXTS)
        assert contrast >= 4.5
        assert hidden == []
        brightness = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] > 127")
        assert brightness == (scheme == "light")

        def sorted_by(column: str) -> list[str]:
            page.get_by_role("button", name=column, exact=True).click()
            return page.locator(".sortable tbody td:first-child").all_text_contents()

        falling = sorted(rows, key=lambda name: -rows[name])
        assert sorted_by("rows") == falling
        assert page.get_by_role("columnheader", name="rows").get_attribute("aria-sort") == "descending"
        assert sorted_by("rows") == falling[::-1]
        assert sorted_by("table") == ["<script>", "t2", "t10", names[3]]
        for _ in range(2):  # it has no runner-up, so it is last in either order
            assert sorted_by("more time")[-1] == "t2"
