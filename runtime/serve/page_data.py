"""What the page has to know of the server before it can ask: `GET /page-data`."""

from typing import Any

from runtime.serve.models import Models, Served


def page_data(models: Models, version: str, original: str | None, has_runs: bool) -> dict[str, Any]:
    """The models with what may be chosen of each, and which views there is something for.

    original  name of the model that others are compared with; None: there is none.
    """
    return {
        "version": version,
        "models": [_model(one) for one in models],
        "original": original,
        "runs": has_runs,
    }


def _model(served: Served) -> dict[str, Any]:
    about = served.about
    return {
        "name": served.name,
        "context": about["context"],
        "drafters": about["drafters"],
        "exact": about["exact"],
        "fingerprint": about["fingerprint"],
        "pages": about["pages"],
        "max_batch": about["max_batch"],
        "chat": bool(served.vocabulary.tokenizer.chat_template),
        "defaults": served.vocabulary.defaults,
        "state": served.front.state,
    }
