#!/usr/bin/env python3
"""Uses the page of scripts/explorer.py in a headless Chromium as a person would, and compares every figure on it with
what ./train_gpt --plan --json prints: long_explorer_test.sh runs this.

    python3 test/scripts/python/check_explorer_page.py CHROMIUM [PICTURE.png]

PICTURE.png: then also makes a picture of the page, such as dev/docs/explorer.png.
"""
import json
import shlex
import sys

sys.dont_write_bytecode = True
from browser import Browser   # noqa: E402
from check_explorer import Explorer, trainer   # noqa: E402

GIB = 2**30


def settled(page):
    page.wait("document.body && document.body.dataset.state === 'ready'", "the plan asked for")


def visit(page, server, choices=None, tab="plan"):
    """Opens the page with these choices, as somebody would who was sent its address."""
    page.open("about:blank")
    page.open(server.url + "#" + "&".join([f"tab={tab}", *(f"{k}={v}" for k, v in (choices or {}).items())]))
    settled(page)


def shown(page):
    """The command on the page, its figures, and the program's plan for this command."""
    words = shlex.split(page.evaluate("byId('command').textContent"))
    figures = page.evaluate("Object.fromEntries([...document.querySelectorAll('[data-figure]')]"
                            ".map((e) => [e.dataset.figure, Number(e.dataset.value)]))")
    return words, figures, json.loads(trainer(["--json", *words[1:]]).stdout)


def check_figures(page):
    """All numbers, bars and boxes on the page are those of the plan."""
    words, figures, plan = shown(page)
    time, stages = plan["time"], plan["stages"]
    assert figures == {
        "step_seconds": plan["step_seconds"], "tokens_per_second": plan["tokens_per_second"], "mfu": plan["mfu"],
        "memory_bytes": plan["memory_bytes"], "exposed": time["exposed_communication_seconds"],
        "bubble": time["bubble_seconds"], "micro_batches": plan["batch"]["micro_batches"],
        "parameters": plan["model"]["parameters"]}, (words, figures)
    fits = page.evaluate("document.querySelector('[data-figure=memory_bytes] dt').textContent")
    assert fits == f"memory of a rank: {'fits' if plan['fits'] else 'does not fit'}", fits

    # Bars: each row of memory as long as its bytes; the time adds up to the whole width.
    bars = page.evaluate("[...document.querySelectorAll('#memory svg rect')].map((r) =>"
                         " [r.querySelector('title').textContent, r.width.baseVal.value, r.y.baseVal.value])")
    limit = page.evaluate("document.querySelector('#memory svg .limit').x1.baseVal.value") - 110
    rows = {}
    for _, width, y in bars:
        rows[y] = rows.get(y, 0) + width
    different = [s["memory_bytes"] for k, s in enumerate(stages) if k == 0 or s["memory"] != stages[k - 1]["memory"]]
    lengths = [width / limit * plan["memory_limit_bytes"] for _, width in sorted((y, rows[y]) for y in rows)]
    assert len(lengths) == len(different), (lengths, different)
    assert all(abs(a - b) < 1e-4 * b for a, b in zip(lengths, different)), (lengths, different)
    totals = page.evaluate("[...document.querySelectorAll('#memory tbody tr:last-child td')].map((e) => e.textContent)")
    assert totals[0] == "total" and len(totals) == 1 + len(different), totals
    for text, expected in zip(totals[1:], different):
        number, unit = text.split()
        size = float(number.replace(",", "")) * {"MiB": 2**20, "GiB": GIB, "TiB": 2**40}[unit]
        assert abs(size - expected) <= 0.006 * expected, (text, expected)
    split = page.evaluate("[...document.querySelectorAll('#time svg rect')].map((r) => r.width.baseVal.value)")
    assert abs(sum(split) - 952) < 0.1, split
    parts = page.evaluate("[...document.querySelectorAll('#time details td:first-child')].map((e) => e.textContent)")
    groups = [each["group"] for each in stages[time["slowest_stage"]]["exposed"]]
    assert [p[len("exposed: "):] for p in parts if p.startswith("exposed: ")] == groups, (parts, groups)
    assert ("bubble" in parts) == (time["bubble_seconds"] > 0)

    # The schedule: as many boxes of each kind as the plan has passes.
    boxes = page.evaluate("[...document.querySelectorAll('#timeline rect[data-kind]')].map((r) => r.dataset.kind)")
    passes = [p["kind"] for stage in stages for p in stage["timeline"]]
    assert sorted(boxes) == sorted(passes), (len(boxes), len(passes))
    return words, plan


def check_texts(page):
    """No text of a picture is cut off or lies on another."""
    faults = page.evaluate("""[...document.querySelectorAll('svg')].flatMap((s) => {
      if (!s.getClientRects().length) return [];   // on a hidden page
      const box = s.viewBox.baseVal, texts = [...s.querySelectorAll('text')].map((t) => [t.textContent, t.getBBox()]);
      const outside = (b) => b.x < 0 || b.y < -1 || b.x + b.width > box.width || b.y + b.height > box.height;
      const faults = texts.filter(([, b]) => outside(b)).map(([text]) => `cut off: ${text}`);
      texts.forEach(([text, a], i) => texts.slice(i + 1).forEach(([other, b]) => {
        if (a.x < b.x + b.width && b.x < a.x + a.width && a.y + 2 < b.y + b.height && b.y + 2 < a.y + a.height)
          faults.push(`${text} on ${other}`);
      }));
      return faults;
    })""")
    assert faults == [], faults[:10]


# Choices in which each control can move by a step to another plan. Sliders are moved by the arrow keys.
MOVES = {"model": {}, "machine": {}, "dtype": {"model": "llama3:1B"}, "ranks": {}, "tp": {}, "tp_overlap": {"tp": 2},
         "cp": {}, "cp_attention": {"cp": 2}, "pp": {}, "schedule": {"pp": 2},
         "chunks": {"pp": 2, "schedule": "interleaved"}, "ep": {"model": "mixtral:8x7B", "seq_len": 4096},
         "zero_stage": {"zero_stage": 1}, "replicas": {}, "batch_size": {}, "seq_len": {"seq_len": 2048},
         "total_batch": {"total_batch": 1048576}, "recompute": {}}


def check_controls(page, server):
    names = page.evaluate("Object.keys(controls)")
    assert set(names) == set(MOVES), set(names) ^ set(MOVES)
    for name in names:
        visit(page, server, MOVES[name])
        before, _ = check_figures(page)
        if page.evaluate(f"byId('c-{name}').type") == "range":
            page.evaluate(f"byId('c-{name}').focus()")
            page.key("ArrowRight")
        else:
            page.evaluate(f"""(() => {{ const c = byId('c-{name}');
              c.selectedIndex = (c.selectedIndex + 1) % c.options.length;
              c.dispatchEvent(new Event('input', {{bubbles: true}})); }})()""")
        settled(page)
        option = page.evaluate(f"controls.{name}.option")
        assert page.evaluate("byId('error').hidden"), (name, page.evaluate("byId('error').textContent"))
        after, plan = check_figures(page)
        changed = [word for word in after if word not in before] + [word for word in before if word not in after]
        assert changed and (option in after or option in before), (name, before, after)
        value = page.evaluate(f"choices.{name}")
        if option in after and value != "on":
            assert after[after.index(option) + 1] == str(value), (name, value, after)
        assert f"{name}=" in page.evaluate("location.hash") or value == page.evaluate(f"controls.{name}.start"), name
        assert plan["step_seconds"] > 0


def check_suggestions(page, server):
    visit(page, server)
    for k, (gpus, model) in enumerate([(1, "gpt2:774M"), (8, "llama3:8B"), (16384, "llama3:405B")]):
        page.evaluate(f"document.querySelectorAll('#suggested button')[{k}].click()")
        settled(page)
        words, plan = check_figures(page)
        assert plan["layout"]["ranks"] == gpus and plan["model"]["name"] == model and plan["fits"], words
        check_texts(page)
    # Zoomed in, the schedule is as many times as wide.
    widths = []
    for zoom in range(3):
        page.evaluate(f"byId('zoom').value = {zoom}; byId('zoom').dispatchEvent(new Event('input'))")
        widths.append(page.evaluate("document.querySelector('#timeline svg').getBoundingClientRect().width"))
        assert page.evaluate("byId('zoom-value').textContent") == f"{2**zoom}×"
        check_texts(page)
    assert abs(widths[1] / widths[0] - 2) < 0.01 and abs(widths[2] / widths[0] - 4) < 0.01, widths
    labels = page.evaluate("[...drawTimeline(lastPlan, {end: 1.9, zoom: 64}).querySelectorAll('text.soft')]"
                           ".map((t) => t.textContent)")
    assert len(labels) == len(set(labels)) == 381 and labels[201] == "1.005 s", labels
    # Whole milliseconds, which are longer.
    visit(page, server, {"ranks": 64, "zero_stage": 1, "total_batch": 0})
    check_texts(page)


def check_refusal(page, server):
    """A refused plan shows the program's own words, and no figures of another plan."""
    visit(page, server, {"tp": 3})
    words = shlex.split(page.evaluate("byId('command').textContent"))
    text = page.evaluate("byId('error').textContent")
    assert text == trainer(words[1:]).stderr.strip() and "--tp 3" in text, text
    assert page.evaluate("getComputedStyle(byId('figures')).display") == "none"
    page.evaluate("byId('c-tp').focus()")
    page.key("Home")
    settled(page)
    check_figures(page)
    assert page.evaluate("byId('error').hidden")
    # What the address says that no control has is ignored.
    visit(page, server, {"tp": "two", "out_dir": "/tmp/x", "__proto__": "1", "model": "<b>", "cp": "1e9"})
    error = page.evaluate("byId('error').textContent")
    assert error == "cp 1000000000: use a whole number from 1 to 64", error


def check_text(page, server):
    visit(page, server, {"pp": 2})
    page.evaluate("byId('show-text').click()")
    page.wait("!byId('text').hidden", "the plan as text")
    words = shlex.split(page.evaluate("byId('command').textContent"))
    assert page.evaluate("byId('text').textContent") == trainer(words[1:]).stdout
    # The text of a plan that does not fit has advice.
    visit(page, server, {"zero_stage": 0})
    page.evaluate("byId('show-text').click()")
    page.wait("!byId('text').hidden", "the plan as text")
    assert "it would with" in page.evaluate("byId('text').textContent")
    # A text that comes after a control has moved on is that of another command.
    page.evaluate("""{ const at_once = ask, wait = new Promise((go) => { letGo = go; });
      ask = (path, wanted) => path !== '/text' ? at_once(path, wanted)
                                               : (late = wait.then(() => at_once(path, wanted)));
      byId('show-text').click();
      choices.tp = 2;
      changed(); }""")
    settled(page)
    page.evaluate("letGo(); late.then(() => new Promise((go) => setTimeout(go)))")
    assert page.evaluate("byId('text').hidden"), "the text of another plan"


def check_often(page, server):
    """Browsers refuse to write the address many times within seconds; the plans are asked for all the same."""
    visit(page, server)
    page.evaluate("history.replaceState = () => { throw new DOMException('too often', 'SecurityError'); };"
                  "choices.tp = 4; changed()")
    settled(page)
    words, _ = check_figures(page)
    assert words[words.index("--tp") + 1] == "4", words


def check_schedules(page, server):
    """Each picture is the plan of its schedule, and they are on one axis."""
    visit(page, server, tab="schedules")
    # Without an answer they are asked for again.
    page.wait("byId('s-charts').dataset.state === 'ready'", "all schedules")
    page.evaluate("realFetch = fetch; fetch = async () => { throw new Error('gone'); };"
                  "byId('s-batches').value = 3; byId('s-batches').dispatchEvent(new Event('input'))")
    page.wait("byId('s-charts').dataset.state === 'ready' && !document.querySelector('#s-charts svg')", "errors")
    assert "gone" in page.evaluate("byId('s-charts').textContent")
    page.evaluate("fetch = realFetch; byId('tab-plan').click(); byId('tab-schedules').click()")
    page.wait("byId('s-charts').dataset.state === 'ready' && document.querySelectorAll('#s-charts svg').length === 6",
              "all schedules, asked for again")
    for stages, batches in ((4, 8), (2, 5)):
        page.evaluate(f"""byId('s-stages').value = {stages.bit_length() - 1}; byId('s-batches').value = {batches};
                          byId('s-batches').dispatchEvent(new Event('input'))""")
        page.wait("byId('s-charts').dataset.state === 'ready'", "all schedules")
        charts = page.evaluate("[...document.querySelectorAll('#s-charts section')].map((s) => [s.dataset.schedule,"
                               " Number(s.dataset.seconds), s.querySelectorAll('rect[data-kind]').length])")
        common = ("--plan --json --sample-every 0 --model llama3:8B --machine h100x8 --dtype bf16 --ranks "
                  f"{stages} --pp {stages} --seq-len 8192 --total-batch-size {8192 * batches}")
        expected = [("Naive", f"--schedule gpipe --batch-size {batches}"), ("GPipe", "--schedule gpipe --batch-size 1"),
                    ("1F1B", "--batch-size 1"), ("Interleaved", "--schedule interleaved --pp-chunks 2 --batch-size 1"),
                    ("Zero-bubble, ZB-H1", "--schedule zb-h1 --batch-size 1"),
                    ("Zero-bubble, ZB-V", "--schedule zb-v --batch-size 1")]
        plans = [json.loads(trainer(f"{common} {options}".split()).stdout) for _, options in expected]
        boxes = [sum(len(stage["timeline"]) for stage in plan["stages"]) for plan in plans]
        assert charts == [[name, plan["step_seconds"], count]
                          for (name, _), plan, count in zip(expected, plans, boxes)], charts
        check_texts(page)
        ends = page.evaluate("""[...document.querySelectorAll('#s-charts svg')].map((s) => Math.max(
          ...[...s.querySelectorAll('rect[data-kind]')].map((r) => r.x.baseVal.value + r.width.baseVal.value)))""")
        longest = max(plan["step_seconds"] for plan in plans)
        for end, plan in zip(ends, plans):
            assert abs((end - 70) / 896 - plan["step_seconds"] / longest) < 2e-3, (end, plan["step_seconds"])


def ring_by_hand(N):
    """The chunks of each rank after every step, by the loops of llmc/comm/ring.h, as sums."""
    held = [[r + 1 + 10 * c for c in range(N)] for r in range(N)]
    yield [row[:] for row in held]
    for s in range(N - 1):   # rank r sends shard r - 1 - s
        sent = [held[r][(r - 1 - s) % N] for r in range(N)]
        for r in range(N):
            held[(r + 1) % N][(r - 1 - s) % N] += sent[r]
        yield [row[:] for row in held]
    for s in range(N - 1):   # and then r - s, which is complete
        sent = [held[r][(r - s) % N] for r in range(N)]
        for r in range(N):
            held[(r + 1) % N][(r - s) % N] = sent[r]
        yield [row[:] for row in held]


def check_ring(page, server):
    visit(page, server, tab="ring")
    numbers = """((id) => [...document.querySelectorAll(`#${id} svg rect + text`)].map((t) => Number(t.textContent)))"""
    for N in (2, 3, 5, 12):
        page.evaluate(f"byId('r-ranks').value = {N}; byId('r-ranks').dispatchEvent(new Event('input'));"
                      "byId('r-step').value = 0; byId('r-step').dispatchEvent(new Event('input'))")
        sums = [sum(r + 1 + 10 * c for r in range(N)) for c in range(N)]
        steps = list(ring_by_hand(N))
        assert len(steps) == 2 * N - 1 and steps[-1] == [sums] * N
        for step, expected in enumerate(steps):
            assert page.evaluate("byId('r-step-value').textContent") == f"{step} of {2 * (N - 1)}"
            assert page.evaluate(f"{numbers}('r-ring')") == sum(expected, []), (N, step)
            check_texts(page)
            if step == N - 1:   # gathered: rank 0 alone has the sums; reduce-scattered: rank r has that of chunk r
                assert page.evaluate(f"{numbers}('r-naive')")[:N] == sums
                assert [expected[r][r] for r in range(N)] == sums
            page.evaluate("byId('r-next').click()")
        assert page.evaluate(f"{numbers}('r-naive')") == sums * N
        page.evaluate("byId('r-back').click()")
        assert page.evaluate("byId('r-step-value').textContent") == f"{2 * (N - 1) - 1} of {2 * (N - 1)}"
    # It plays by itself to the end.
    page.evaluate("byId('r-ranks').value = 2; byId('r-step').value = 0; byId('r-play').click()")
    page.wait("byId('r-step-value').textContent === '2 of 2' && byId('r-play').textContent === 'Play'", "its end")


def check_access(page, server):
    """Everything can be reached by the keyboard and has a name."""
    visit(page, server)
    unnamed = page.evaluate("[...document.querySelectorAll('input, select')].filter((e) => !e.labels.length)"
                            ".map((e) => e.id)")
    pictures = page.evaluate("document.querySelectorAll('svg:not([aria-label])').length")
    twice = page.evaluate("((ids) => ids.filter((id, k) => ids.indexOf(id) !== k))"
                          "([...document.querySelectorAll('[id]')].map((e) => e.id))")
    assert (unnamed, pictures, twice) == ([], 0, []), (unnamed, pictures, twice)
    assert page.evaluate("byId('c-seq_len').getAttribute('aria-valuetext')") == "8,192 tokens"
    page.evaluate("byId('tab-plan').focus()")
    for name in ("schedules", "ring", "plan"):
        page.key("ArrowRight")
        assert page.evaluate(f"document.activeElement.id === 'tab-{name}' && !byId('page-{name}').hidden"), name
        assert page.evaluate("document.querySelectorAll('main:not([hidden])').length") == 1
    # The page fits into a narrow window.
    page.call("Emulation.setDeviceMetricsOverride", width=420, height=900, deviceScaleFactor=1, mobile=False)
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    page.call("Emulation.clearDeviceMetricsOverride")


def main():
    chromium, pictures = sys.argv[1], sys.argv[2:]
    with Explorer() as server, Browser(chromium) as page:
        visit(page, server)
        check_figures(page)
        check_texts(page)
        check_controls(page, server)
        check_suggestions(page, server)
        check_refusal(page, server)
        check_text(page, server)
        check_often(page, server)
        check_schedules(page, server)
        check_ring(page, server)
        check_access(page, server)
        # No error of a script, and nothing asked of anybody else. Plans that were refused are logged by their status.
        errors = [e for e in page.errors if "server responded with a status of 4" not in e.get("text", "")]
        assert errors == [], errors
        asked = page.evaluate("performance.getEntriesByType('resource').map((e) => e.name)")
        assert asked and all(name.startswith(server.url) for name in asked), asked
    for path in pictures:
        with Explorer() as server, Browser(chromium, 1280, 1240) as page:
            page.call("Emulation.setScrollbarsHidden", hidden=True)
            visit(page, server, {"ranks": 16, "pp": 4, "schedule": "zb-h1", "zero_stage": 1, "total_batch": 262144})
            page.screenshot(path)
    print(f"{len(MOVES)} controls moved")


if __name__ == "__main__":
    main()
