"""A page's code as one file: what a reader has who copies it, and nothing else; arguments: the page, and a folder.

The blocks run in order, in one namespace that is empty at first; `>>>` blocks are compared with their output. The folder has
stubs of libraries that pages use and the lock has not; an installed library comes before its stub.
"""

import doctest
import os
import re
import sys
import warnings

page, stubs = sys.argv[1:]
sys.path.append(stubs)
os.environ.pop("KERAS_BACKEND", None)  # of conftest.py: a page sets it itself
os.chdir(os.path.dirname(os.path.abspath(__file__)))  # what the page writes ends with this program's folder
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)  # of Keras with numpy 2
with open(page) as file:
    blocks = re.findall(r"```(?:\{code-block\} )?(python|pycon)\b[^\n]*\n(?::[^\n]*\n)*(.*?)```", file.read(), re.DOTALL)
names: dict[str, object] = {"__name__": "__main__"}
failed = 0
for language, block in blocks:
    if language == "python":
        exec(compile(block, page, "exec"), names)
        continue
    test = doctest.DocTestParser().get_doctest(block, names, os.path.basename(page), page, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test, clear_globs=False)
    names.update(test.globs)
    failed += runner.failures
sys.exit(failed)
