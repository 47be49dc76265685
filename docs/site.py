"""The documentation as a site (``make docs``): a hook of mkdocs that generates pages and adapts the others.

Pages are written for readers of the repository. Here links to files that are no pages become their names, and what only
the tests need is left out. The references of commands and of Python are generated from the code.
"""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files

import incofl
from incofl.cli import app
from incofl.method import Method
from incofl.methods import METHODS

ROOT = Path(__file__).parents[1]
COPIED = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md"}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are generated."""
    made = {"command-line.md": command_line(), "python.md": python(), "methods-in-code.md": methods()}
    made |= {page: (ROOT / source).read_text(encoding="utf-8") for page, source in COPIED.items()}
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """One page, as mkdocs reads Markdown."""
    inside = page.file.src_path in COPIED

    def link(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        path, _, anchor = target.partition("#")
        if "://" in path or not path:
            return found[0]
        place = (ROOT if inside else ROOT / "docs") / path
        known = {source: made for made, source in COPIED.items()}
        resolved = place.resolve()
        name = resolved.relative_to(ROOT).as_posix() if resolved.is_relative_to(ROOT) else path
        if name in known:
            return f"[{text}]({known[name]}{'#' + anchor if anchor else ''})"
        if name.startswith("docs/") and resolved.is_file() and resolved.suffix in (".md", ".png", ".svg"):
            return f"[{text}]({name.removeprefix('docs/')}{'#' + anchor if anchor else ''})"
        return text if text.strip("`") == name else f"{text} (`{name}`)"

    text = re.sub(r"^( *```\w+) [a-z-]+$", r"\1", markdown, flags=re.MULTILINE)
    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.DOTALL | re.MULTILINE)
    for number in range(0, len(parts), 2):  # outside of code
        prose = re.sub(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", link, parts[number])
        # A list may follow a paragraph without a blank line.
        parts[number] = re.sub(
            r"^((?! *(?:[-*|#]|\d+\.) )\S[^\n]*)\n(?=(?:- |\* |\d+\. ))", r"\1\n\n", prose, flags=re.MULTILINE
        )
    return "".join(parts)


def command_line() -> str:
    """Every command with its arguments and options, from the code."""
    text = (
        "# Command line\n\nGenerated from the code; `incofl COMMAND --help` says the same. Exit codes: 0 done, 2 bad "
    )
    text += "input (one line on stderr), 130 interrupted with all finished rounds saved.\n"

    def add(command: Any, name: str) -> None:
        nonlocal text
        inner = getattr(command, "commands", {})
        if name and not inner:
            arguments = [each for each in command.params if each.param_type_name == "argument"]
            usage = " ".join(["incofl", name, *(str(each.make_metavar(typer.Context(command))) for each in arguments)])
            text += f"\n## {name}\n\n```\n{usage} [OPTIONS]\n```\n\n{inspect.cleandoc(command.help or '')}\n\n"
            rows = [each for each in command.params if not getattr(each, "hidden", False)]
            text += "| option | meaning | default |\n|---|---|---|\n" if rows else ""
            for each in rows:
                option = each.param_type_name == "option"
                shown = ", ".join(f"`{word}`" for word in (each.opts if option else [each.human_readable_name]))
                plain = each.default is None or each.default is False or callable(each.default) or each.required
                default = "" if plain else f"`{each.default}`"
                text += f"| {shown} | {(each.help or '').replace('|', chr(92) + '|')} | {default} |\n"
        for key, each in inner.items():
            add(each, f"{name} {key}".strip())

    add(typer.main.get_command(app), "")
    return text


def python() -> str:
    """Every public name with its signature and docstring."""
    text = "# Python\n\nGenerated from the code: all public names, importable from `incofl`.\n"
    for name in sorted(incofl.__all__, key=str.lower):
        value = getattr(incofl, name)
        text += f"\n## {name}\n\n"
        if not callable(value):
            text += f"A mapping with {len(value)} entries: {', '.join(f'`{key}`' for key in list(value)[:12])}, ...\n"
            continue
        kind = "class " if inspect.isclass(value) else ""
        text += f"```python\n{kind}{signature(name, value)}\n```\n\n{described(value)}\n"
        members = {key: member for key, member in vars(value).items() if inspect.isclass(value) and key[0] != "_"}
        for key, member in members.items():
            member = getattr(member, "__func__", member)
            if inspect.isfunction(member) and member.__doc__:
                text += f"\n### {name}.{key}\n\n```python\n{signature(key, member)}\n```\n\n{described(member)}\n"
    return text


def methods() -> str:
    """The docstring of each file of methods, under the names that it defines."""
    text = "# Methods in the code\n\nGenerated from the docstrings of `src/incofl/methods`; their options and what "
    text += "they are good for: [methods](methods.md).\n"
    for path in sorted((ROOT / "src" / "incofl" / "methods").glob("[a-z]*.py")):
        module = importlib.import_module(f"incofl.methods.{path.stem}")
        defined = {value.name for value in vars(module).values() if isinstance(value, Method)}
        text += f"\n## {path.stem}\n\n{described(module)}\n"
        if names := sorted(defined & METHODS.keys()):
            text += f"\nNames: {', '.join(f'`{name}`' for name in names)}.\n"
    return text


def signature(name: str, value: Any) -> str:
    """How something is called, on several lines if it is long."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    words = [re.sub(r"<(?:<\w+>|[^<>])*>", "...", str(each)) for each in found.parameters.values()]
    short = f"{name}({', '.join(words)})"
    return short if len(short) < 100 else f"{name}(\n    " + ",\n    ".join(words) + ",\n)"


def described(value: Any) -> str:
    """A docstring as Markdown: sections are lists."""
    text = (inspect.getdoc(value) or "").replace("``", "`")
    text = re.sub(r"\n {8,}", " ", text)
    text = re.sub(r"^(Args|Attributes|Raises|Returns|Yields):$", r"\n**\1**\n", text, flags=re.MULTILINE)
    return re.sub(r"^ {4}(\w+): ", r"- `\1`: ", text, flags=re.MULTILINE)
