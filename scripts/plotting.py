"""What the scripts that plot share."""
import os
import sys


def load_pyplot(fail):
    """matplotlib.pyplot, for files. If it is missing here and Debian's Python, for which its package installs, is another
    one, or this is a virtual environment of it, the script starts again with that; otherwise fail(message) ends it. So
    call it before stdin is read."""
    try:
        import matplotlib
    except ImportError:
        other = "/usr/bin/python3"
        if os.path.exists(other) and os.path.abspath(sys.executable) != other and not os.environ.get("PLOTTING_AGAIN"):
            os.execve(other, [other, *sys.argv], {**os.environ, "PLOTTING_AGAIN": "1"})   # once, whatever `other` is
        fail("matplotlib is missing: apt-get install python3-matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot
    return matplotlib.pyplot


def plain(name):
    """A name, for matplotlib to show it as it is: `$` begins no formula, and `_` does not keep it out of legends."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def save(figure, output, fail):
    try:
        figure.savefig(output, dpi=110)
    except (OSError, ValueError) as error:
        fail(f"cannot write {output}: {error}")
