"""The one plotly.js of a report: the vendored cartesian bundle, of the release that the package speaks."""

import re
from functools import cache
from pathlib import Path

ASSETS = Path(__file__).resolve().parent / "assets"
BUNDLE = "plotly-cartesian.min.js"  # MIT, see plotly-LICENSE.txt; scatter, bar, heatmap, box, histogram, ...
VERSION = re.compile(r"plotly\.js(?: \(cartesian[^)]*\))? v(\d+)\.(\d+)\.(\d+)")


@cache
def plotly_script() -> str:
    """The bundle's text, safe inside a script element. A copy beside plotly's own files is preferred.

    ValueError when the bundle is of an older major version than the installed plotly writes figures for.
    """
    from plotly.offline import get_plotlyjs_version

    text = _path().read_text(encoding="utf-8")
    found = VERSION.search(text[:2000])
    if found is None:
        raise ValueError(
            f"{BUNDLE} does not name its version: take plotly.js-cartesian-dist-min from its release"
        )
    if int(found.group(1)) < int(get_plotlyjs_version().split(".")[0]):
        raise ValueError(
            f"{BUNDLE} is {found.group(0)} but the installed plotly writes for {get_plotlyjs_version()}:"
            " install the plotly release named in constraints.txt"
        )
    return text.replace("</script", "<\\/script")


def _path() -> Path:
    import plotly

    installed = Path(plotly.__file__).parent / "package_data" / BUNDLE
    return installed if installed.is_file() else ASSETS / BUNDLE
