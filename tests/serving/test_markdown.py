"""Markdown in the page, rendered by a browser. No server is needed: `markdown()` is a function of the page's file."""

import time

import pytest

from ..helpers.browser import PAGE, needs_browser

pytestmark = needs_browser
RENDER = "const box = document.createElement('div'); box.append(...markdown(arguments[0]));"


@pytest.fixture(scope="module")
def page(browser):
    browser.get(PAGE.as_uri())
    return browser


def rendered(page, text: str) -> str:
    html = page.execute_script(f"{RENDER} return box.innerHTML;", text)
    return html.replace(' target="_blank" rel="noopener noreferrer"', "").replace(COPY, "")


COPY = '<button class="small" type="button" data-do="copy">Copy</button>'


def code(text: str, language: str = "") -> str:
    return f'<div class="code"><header>{language}</header><pre><code>{text}</code></pre></div>'


TEXTS = {
    "a **b** and __c__, *d* and _e_": "<p>a <strong>b</strong> and <strong>c</strong>, <em>d</em> and <em>e</em></p>",
    "***both*** and **a `b`**": "<p><strong><em>both</em></strong> and <strong>a <code>b</code></strong></p>",
    "2 * 3 * 4, snake_case_name, a**b and \\*c\\*": "<p>2 * 3 * 4, snake_case_name, a**b and *c*</p>",
    "`a *b*` and ``c ` d`` and `e": "<p><code>a *b*</code> and <code>c ` d</code> and `e</p>",
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "# A\n## B ##\n#no": "<h1>A</h1><h2>B</h2><p>#no</p>",
    "text\n# A": "<p>text</p><h1>A</h1>",
    "- a\n- b\n  - c\n- d": "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li><li><p>d</p></li></ul>",
    "2. a\n\n3. b\nmore": '<ol start="2"><li><p>a</p></li><li><p>b\nmore</p></li></ol>',
    "* a\n\nend": "<ul><li><p>a</p></li></ul><p>end</p>",
    "1. a\n   ```sh\n   b\n\n     c\n   ```\n2. d": '<ol start="1"><li><p>a</p>'
    + code("b\n\n  c", "sh")
    + "</li><li><p>d</p></li></ol>",
    "```python title\na = '*b*'\n\n# c\n```\nend": code("a = '*b*'\n\n# c", "python") + "<p>end</p>",
    "````\n```\na\n```\n````": code("```\na\n```"),
    "```\nnot closed": code("not closed"),
    "[a](https://b.example/c?d=1_2_3) and https://e.example/f.": '<p><a href="https://b.example/c?d=1_2_3">a</a> and '
    '<a href="https://e.example/f">https://e.example/f</a>.</p>',
    "> a\n> - b\n\n---": "<blockquote><p>a</p><ul><li><p>b</p></li></ul></blockquote><hr>",
    "| a | `b` |\n|---|:-:|\n| 1 | **2** |": "<table><tr><th>a</th><th><code>b</code></th></tr>"
    "<tr><td>1</td><td><strong>2</strong></td></tr></table>",
    "a | b\nc": "<p>a | b\nc</p>",
    "": "",
}


@pytest.mark.parametrize("text", TEXTS)
def test_markdown_becomes_elements(page, text):
    assert rendered(page, text) == TEXTS[text]


ATTACKS = [
    "<script>window.broken = 1</script>",
    "<img src=x onerror='window.broken = 1'>",
    "**<svg onload=window.broken=1>** `<b onclick=x>` # <style>*{}</style>",
    "# <iframe srcdoc='<script>parent.broken = 1</script>'></iframe>",
    "- <a href='javascript:window.broken = 1'>a</a>\n  > <form action=//e.example><button>b</button></form>",
    "[a](javascript:window.broken=1) [b](JaVaScRiPt:window.broken=1) [c](data:text/html,<script>1</script>)",
    '[a](https://b.example/"onmouseover="window.broken=1) [c](https://d.example/\'><img/src=x/onerror=window.broken=1>)',
    "![a](https://b.example/c.png) [a]: javascript:window.broken=1",
    "```<img/src=x/onerror=window.broken=1>\n</code></pre><script>window.broken = 1</script>\n```",
    '```js"onclick="window.broken=1\na\n```',
    "| <img src=x onerror=window.broken=1> |\n|---|\n| <script>window.broken = 1</script> |",
    "\x00<\x00script>window.broken = 1</script>\u2028<img src=x onerror=window.broken=1>",
]
# What an answer may consist of.
TAGS = "p h1 h2 h3 h4 h5 h6 ul ol li strong em code pre a hr blockquote table tbody tr th td".split()
FOREIGN = """
const found = [];
for (const one of box.querySelectorAll("*")) {
  if (one.matches(".code, .code > header, .code > header > button")) continue;
  const names = one.getAttributeNames(), tag = one.tagName.toLowerCase();
  const allowed = tag === "a" ? ["href", "target", "rel"] : tag === "ol" ? ["start"] : [];
  if (!arguments[1].includes(tag) || names.some(name => !allowed.includes(name))) found.push(one.outerHTML);
  else if (tag === "a" && !/^https?:[/][/]/.test(one.href)) found.push(one.outerHTML);
}
return found;
"""


@pytest.mark.parametrize("text", ATTACKS)
def test_no_answer_puts_elements_or_scripts_into_the_page(page, text):
    assert page.execute_script(RENDER + "document.body.append(box);" + FOREIGN, text, TAGS) == []
    time.sleep(0.05)
    assert page.execute_script("return window.broken") is None


def test_a_page_that_parses_answers_as_html_is_found_out(page):
    parse = "const box = document.createElement('div'); box.innerHTML = arguments[0];"
    found = [bool(page.execute_script(parse + FOREIGN, text, TAGS)) for text in ATTACKS]
    assert sum(found) >= 9
    page.execute_script("window.broken = undefined")


@pytest.mark.parametrize(
    "piece", ["*", "**a ", "_", "`", "``a", "[", "[a](", "> ", "- ", "- + ", "| ", "\n", "1. ", "~~~\n"]
)
def test_a_text_that_is_hard_to_read_is_read_at_once(page, piece):
    text = piece * (20_000 // len(piece))
    took = page.execute_script(f"const start = performance.now(); {RENDER} return performance.now() - start;", text)
    assert took < 3000


LONG = "\n\n".join(text for text in TEXTS if text and "not closed" not in text)


def test_a_text_that_grows_looks_like_the_whole_and_leaves_what_is_complete(page):
    script = """
    const box = document.createElement("div"), text = arguments[0];
    let first, changes = 0;
    for (let end = 0; end <= text.length; end += 3) {
      update(box, markdown(text.slice(0, end)));
      if (end > 60 && box.firstChild !== first) { changes += 1; first = box.firstChild; }
    }
    update(box, markdown(text));
    const whole = document.createElement("div");
    whole.append(...markdown(text));
    return [box.innerHTML === whole.innerHTML, changes, whole.children.length];
    """
    assert page.execute_script(script, LONG) == [True, 1, pytest.approx(25, abs=10)]
