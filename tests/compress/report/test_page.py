import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from compress.report import page, plots, speed, wording
from compress.report.schema import Report


@pytest.fixture
def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("report_example.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture
def without_speed(report: dict[str, Any]) -> dict[str, Any]:
    nothing = speed.not_measured()
    report |= {"speed": nothing.speed.model_dump(), "lossless": nothing.lossless.model_dump(by_alias=True)}
    report["not_measured"] |= nothing.not_measured
    return report


def html_of(report: dict[str, Any]) -> str:
    return page.html(Report.model_validate(report))


def markdown_of(report: dict[str, Any]) -> str:
    return page.markdown(Report.model_validate(report))


def plots_of(report: dict[str, Any]) -> dict[str, str]:
    return plots.all_plots(Report.model_validate(report))


class Outline(HTMLParser):
    """Tags, attributes that load something, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for key, value in attrs if key in ("src", "href", "srcset", "data", "action")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(report: dict[str, Any]) -> None:
    text = html_of(report)
    outline = Outline(text)
    assert outline.open == []
    assert not {"script", "link", "iframe", "object"} & set(outline.tags)
    assert len(outline.loads) == 5
    assert all(url.startswith("data:image/svg+xml;base64,") for url in outline.loads)
    assert "url(" not in text and "@import" not in text


def test_page_and_markdown_show_the_same_figures(report: dict[str, Any]) -> None:
    html, markdown = html_of(report), markdown_of(report)
    for figure in ("2.62×", "+1.21 %", "1.18×", "31,200,000 B", "4.127", "83.9", "0.520", "0 mismatches", "94.80 %"):
        assert figure in html and figure in markdown
    for sentence in ("only 0.77 times", "The fastest baseline is faster", "no C++ compiler", "norms are small"):
        assert sentence in html and sentence in markdown
    assert "python -m compress.run --recipe nf4" in html and "python -m compress.run --recipe nf4" in markdown


HOSTILE = "<script>alert('x')</script> | `a` ```\n```` *b*"


def test_everything_is_escaped(report: dict[str, Any]) -> None:
    report["model"] = report["recipe"] = report["quality"]["corpus"]["name"] = HOSTILE
    report["asked"]["recipe"]["about"] = report["asked"]["command"] = HOSTILE
    report["sample"] |= {"prompt": HOSTILE, "original": HOSTILE, "compressed": HOSTILE}
    report["left_alone"] = [{"layer": HOSTILE, "why": HOSTILE}]
    report["quality"]["layers"][0] |= {"name": HOSTILE, "scheme": HOSTILE}
    report["speed"]["baselines"][2]["why"] = report["speed"]["advice"]["why"] = HOSTILE
    report["not_measured"]["speed.baselines.2"] = HOSTILE
    html = html_of(report)
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(&#39;x&#39;)") >= 10
    assert Outline(html).open == []
    outside = without_code_blocks(markdown_of(report))
    assert "<script" not in outside.replace("\\<script", "")
    rows = [line for line in outside.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in (row.rstrip() for row in rows))


def without_code_blocks(markdown: str) -> str:
    """What a reader of CommonMark takes for text: fences close only with as many backticks, alone on their line."""
    kept, fence = [], ""
    for line in markdown.splitlines():
        opening = re.match(r"(`{3,})text$", line)
        if not fence and opening:
            fence = opening[1]
        elif fence and re.fullmatch(r"`{3,}\s*", line) and line.count("`") >= len(fence):
            fence = ""
        elif not fence:
            kept.append(line)
    assert not fence
    return "\n".join(kept)


def test_code_fences_are_longer_than_what_they_hold() -> None:
    assert page.fenced("a").startswith("```text\n")
    assert page.fenced("a ````` b").startswith("``````text\n")
    assert page.cell("a|b\nc <d>") == "a\\|b c \\<d\\>"


def test_control_characters_that_a_model_wrote_are_pictures(report: dict[str, Any]) -> None:
    report["sample"]["compressed"] = "a\x00b\x1b[2J\tc\r\nd"
    for text in (markdown_of(report), html_of(report)):
        assert "a␀b␛[2J\tc␍\nd" in text
        assert not [c for c in text if ord(c) < 32 and c not in "\t\n"]


def test_a_report_without_speed_says_so(without_speed: dict[str, Any]) -> None:
    html, markdown = html_of(without_speed), markdown_of(without_speed)
    assert "--no-speed" in html and "--no-speed" in markdown
    assert set(plots_of(without_speed)) == {"size", "quality", "layers"}
    assert "Speculation and draft length" not in html
    assert Outline(html).open == []


def plain_wins(report: dict[str, Any]) -> dict[str, Any]:
    """The example where no drafter beats plain decoding."""
    speed = report["speed"]
    speed["pairings"].sort(key=lambda row: row["drafter"] != "none")
    speed["pairings"][1]["speedup"] = 0.61
    speed |= {"drafter": "none", "speculative": speed["compressed"]}
    speed["speedup"] |= {"over_compressed": 1.0, "over_original": 0.77, "decode_over_compressed": 1.0}
    speed["advice"] |= {"draft_length": 0, "why": "Speculation does not pay on this machine: so it is."}
    return report


def test_where_no_drafter_pays_plain_decoding_is_the_headline(report: dict[str, Any]) -> None:
    found = Report.model_validate(plain_wins(report))
    text = " ".join(wording.findings(found))
    assert (
        "Speculation does not pay on this machine: the draft pair-draft, the fastest of 3 drafters, gave 0.61×" in text
    )
    headline = wording.headlines(found)[2]
    assert headline.tone == "bad" and "speculation does not pay on this machine: 1.00× over plain" in headline.caption
    markdown = markdown_of(report)
    assert "Advice: do not speculate. Speculation does not pay" in markdown
    assert "no drafter was faster than plain decoding" in markdown
    # The bars are of the ways that somebody would take.
    assert [bar.name for bar in plots.paces(found.speed, "speculative", 1)] == ["original", "compressed"]


def test_every_drafter_has_its_row(report: dict[str, Any]) -> None:
    for text in (html_of(report), markdown_of(report)):
        for figure in ("model", "1.52×", "1.09×", "tree (trial)", "0.75×", "no int8 layers", "timed on no more"):
            assert figure in text
    assert "the fastest of 3 drafters, 4.0 tokens a round (chosen every round)" in markdown_of(report)
    report["speed"]["advice"] |= {"draft_length": 1, "why": "It pays."}
    assert "draft 1 token a round. It pays." in markdown_of(report)
    report["asked"]["draft_length"] = 4
    assert "4.0 tokens a round (asked for)" in markdown_of(report) and "γ was asked for." in markdown_of(report)


def test_ternary_weights_without_training_are_warned_of(report: dict[str, Any]) -> None:
    assert "RUINED" not in markdown_of(report)
    report["asked"]["recipe"]["stages"] = [{"quantize": {"scheme": "ternary", "method": "rtn"}}]
    report["quality"]["perplexity"] |= {"original": 10.0, "compressed": 47.0}
    text = markdown_of(report)
    assert "WARNING: this model is RUINED" in text and "4.70×" in text and "RUINED" in html_of(report)
    assert wording.findings(Report.model_validate(report))[0].startswith("WARNING")
    report["asked"]["recipe"]["stages"] = [{"ternary": {"weights": "ternary"}}]
    assert "RUINED" not in markdown_of(report)
    report["calibration"]["training"] = {"ternary": {"warning": "Rounding without training RUINS this model."}}
    assert wording.findings(Report.model_validate(report))[0] == "Rounding without training RUINS this model."


def test_a_model_without_draft_names_the_lookup_drafter(report: dict[str, Any]) -> None:
    report["draft"] = None
    report["speed"] |= {"drafter": "lookup", "fastest_drafter": "lookup"}
    text = markdown_of(report)
    assert "none; the fastest drafter is lookup" in text
    assert "Speculation with the drafter lookup" in text


def test_zeros_save_nothing_here_and_the_report_says_so(report: dict[str, Any]) -> None:
    assert "dense file" not in markdown_of(report)
    zeros = {"layers": 28, "zero_share": 0.5, "value_bytes": 25_000_000, "two_of_four_bytes": 14_062_500}
    report["size"]["sparsity"] = zeros
    Report.model_validate(report)
    for text in (html_of(report), markdown_of(report)):
        assert "50.00 % of the weights of 28 pruned layers are zeros. That saves neither bytes nor time here" in text
        assert "A 2:4 store would take 14.1 MB for these layers' values instead of 25.0 MB" in text.replace(
            "&#39;", "'"
        )
    zeros["two_of_four_bytes"] = None
    with pytest.raises(ValidationError, match="two_of_four_bytes"):
        Report.model_validate(report)
    report["not_measured"]["size.sparsity.two_of_four_bytes"] = "the zeros do not lie so"
    Report.model_validate(report)
    assert "A 2:4 store cannot hold them" in markdown_of(report)


def test_every_expert_is_named_with_its_tokens(report: dict[str, Any]) -> None:
    assert "Experts" not in markdown_of(report)
    handled = {(0, 1): "all tokens", (1, 7): "rounded to nearest"}
    report["calibration"]["experts"] = [
        {"block": b, "expert": e, "tokens": 1000 * b + 10 * e + 1, "handled": handled.get((b, e), "calibrated")}
        for b in range(2)
        for e in range(8)
    ]
    Report.model_validate(report)
    html = html_of(report)
    for text in (html, markdown_of(report)):
        assert "2 of 16 experts were routed fewer calibration tokens than the recipe asks for" in text
        assert "0.1 (11), 1.7 (1,071)" in text and "1, 11, 21, 31, 41, 51, 61, 71" in text
    assert '<th scope="row">1</th><td>8</td><td>1,001</td><td>1,041</td><td>1,071</td><td>7</td>' in html
    for expert in report["calibration"]["experts"]:
        expert["handled"] = "calibrated"
    text = markdown_of(report)
    assert "were routed fewer" not in text and "## Experts" in text
    report["calibration"]["experts"][0]["handled"] = "skipped"
    with pytest.raises(ValidationError, match="handled"):
        Report.model_validate(report)


def test_stages_that_trained_are_shown_with_their_curve(report: dict[str, Any]) -> None:
    assert "## Training" not in markdown_of(report) and "training" not in plots_of(report)
    report["calibration"]["training"] = {
        "heal": {
            "budget": {"minutes": 20.0},
            "text": {"source": "some <text>", "documents": 500, "held_out_tokens": 8192},
            "steps": 400,
            "tokens": 819_200,
            "seconds": 1187.4,
            "before": 2.4761,
            "best": 2.1234,
            "best_step": 300,
            "perplexity": {"original": 11.489, "pruned": 11.895, "healed": 8.3597},
            "curve": [
                {"step": 0, "tokens": 0, "rate": 0.0, "held_out": 2.4761},
                {"step": 200, "tokens": 409_600, "loss": 0.05, "rate": 5e-4},
                {"step": 300, "tokens": 614_400, "loss": 0.04, "rate": 2e-4, "held_out": 2.1234},
                {"step": 400, "tokens": 819_200, "loss": 0.03, "rate": 2e-5, "held_out": 2.1301},
            ],
        },
    }
    Report.model_validate(report)
    html, markdown = html_of(report), markdown_of(report)
    for figure in ("20 minutes", "400", "819,200", "1,187 s", "2.4761", "2.1234 (step 300)", "11.895", "8.360"):
        assert figure in html and figure in markdown
    assert "some &lt;text&gt;, 500 documents" in html and "8,192 other tokens" in markdown
    assert len(Outline(html).loads) == 6
    one = plots_of(report)["training"]
    report["calibration"]["training"]["draft"] = report["calibration"]["training"]["heal"]
    assert plots_of(report)["training"] != one


def test_each_lossless_class_has_its_sentence(report: dict[str, Any]) -> None:
    sentences = set()
    for name in ("exact", "measured", "distribution", "lossy"):
        report["lossless"] |= {"class": name, "mismatches": 1}
        sentences.add(wording.lossless(Report.model_validate(report)).replace(name, ""))
        assert "1 mismatch." in wording.lossless(Report.model_validate(report))
    assert len(sentences) == 4


def test_plots_are_the_same_bytes_for_the_same_figures(report: dict[str, Any]) -> None:
    first, second = plots_of(report), plots_of(report)
    assert first == second
    svg = base64.b64decode(first["speed"].split(",", 1)[1]).decode()
    assert svg.count("<svg") == 1 and "<image" not in svg and "<script" not in svg


def test_no_point_of_the_fitted_acceptance_is_cut_off(report: dict[str, Any]) -> None:
    report["speed"] |= {"accepted_by_position": [0.7, 0.6, 0.5], "per_token_acceptance": 0.9}
    figure = plots.acceptance_by_position(Report.model_validate(report))
    assert figure is not None
    [axes], (low, high) = figure.axes, figure.axes[0].get_ylim()
    [fitted] = axes.lines
    assert [round(float(y), 6) for y in fitted.get_ydata()] == [90.0, 81.0, 72.9]
    assert low == 0 and high > 95


def test_plots_without_interval_and_with_one_layer(report: dict[str, Any]) -> None:
    report["quality"]["perplexity"]["ci95"] = None
    report["not_measured"] |= dict.fromkeys(("quality.perplexity.ci95", "size.draft_bytes"), "not here")
    report["quality"]["layers"] = report["quality"]["layers"][:1]
    report["size"]["draft_bytes"] = None
    report["speed"]["accepted_by_position"] = [0.5 * 0.9**i for i in range(24)]
    assert set(plots_of(report)) == {"size", "quality", "speed", "acceptance", "layers"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.mlp.up_proj", (3, "up_proj")),
        ("transformer.h.11.attn.c_attn", (11, "c_attn")),
        ("model.layers.2.mlp.experts.5.w1", (2, "w1")),
        ("lm_head", (7, "lm_head")),
    ],
)
def test_layer_names(name: str, expected: tuple[int, str]) -> None:
    assert plots.split_layer_name(name, 7) == expected
