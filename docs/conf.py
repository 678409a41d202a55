"""How Sphinx builds these pages: Markdown by MyST, the reference from the docstrings."""

from fuel_parallel.version import __version__

project = "fuel-parallel"
copyright = "the fuel-parallel authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.apidoc", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

default_role = "code"  # `x` in a docstring is code, as in Markdown
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
apidoc_modules = [
    {
        "path": "../fuel_parallel",
        "destination": "api",
        "separate_modules": True,
        "module_first": True,
        "include_private": False,
        "automodule_options": {"members", "show-inheritance"},
    }
]
