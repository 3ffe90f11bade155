"""Fifty texts that would run, or reach another host, if they became markup, an address or a style."""

_CALL = "window.ran=(window.ran||0)+1"
_TAGS = (
    "<script>{c}</script>", "<img src=x onerror={c}>", "<img src=x onerror='{c}'//", "<svg onload={c}>",
    "<svg><script>{c}</script></svg>", "<body onload={c}>", "<iframe src=javascript:{c}></iframe>",
    "<iframe srcdoc='<script>parent.{c}</script>'></iframe>", "<a href=javascript:{c} autofocus onfocus={c}>x</a>",
    "<input autofocus onfocus={c}>", "<select autofocus onfocus={c}>", "<textarea autofocus onfocus={c}>",
    "<details open ontoggle={c}>", "<video src=x onerror={c}>", "<audio src=x onerror={c}>",
    "<video><source onerror={c}></video>", "<object data=javascript:{c}>", "<embed src=javascript:{c}>",
    "<marquee onstart={c}>", "<style onload={c}></style>", "<link rel=stylesheet href=http://other.test/x.css>",
    "<meta http-equiv=refresh content='0;url=http://other.test/'>", "<base href=http://other.test/>",
    "<form action=http://other.test/><button>x</button></form>", "<math><mtext><script>{c}</script></mtext></math>",
    "<template><script>{c}</script></template>", "<noscript><img src=x onerror={c}></noscript>",
    "<table background=http://other.test/x.png>", "<img src=http://other.test/x.png>",
    "<script src=http://other.test/x.js></script>", "<svg><a xlink:href=javascript:{c}><text>x</text></a></svg>",
    "<svg><animate onbegin={c} attributeName=x dur=1s>", "<svg><use href='data:image/svg+xml,<svg onload={c}>'></svg>",
    "<div style=background:url(http://other.test/x.png)>", "<p style='animation:x' onanimationstart={c}>",
)  # fmt: skip
_ESCAPES = (
    "</textarea><script>{c}</script>", "</title><script>{c}</script>", "</style><script>{c}</script>",
    "--><script>{c}</script>", "]]><script>{c}</script>", '"><script>{c}</script>', "'><img src=x onerror={c}>",
    '" onmouseover="{c}', "' autofocus onfocus='{c}", "javascript:{c}", "data:text/html,<script>{c}</script>",
    "`${{{c}}}`", "{{{{constructor.constructor('{c}')()}}}}", "\\u003cscript\\u003e{c}\\u003c/script\\u003e",
    "&lt;script&gt;{c}&lt;/script&gt;",
)  # fmt: skip
PAYLOADS = [one.format(c=_CALL) for one in (*_TAGS, *_ESCAPES)]
