"""README.md and docs/ against the application: every kvbench line works, and everything there is has a name in them.

Run by scripts/test as a stage of its own (``python tests/docs_check.py``: one line a problem, exit 1) and by
test_docs.py. What is checked:

- in code blocks and in inline code: lines of ``kvbench`` and ``scripts/bench``: command, options, and the suites,
  benches, axes and axis values they select. Words in capitals, with ``...`` or in brackets are placeholders;
- inline code that is one option: some command (or the pytest plugin) has it;
- tables whose first column is headed command, metric, status or run status: every name in it exists;
- the other way round: every command, option, metric and status that exists is named in code somewhere.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbench.contract.discover import Suites

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = frozenset({"kvbench", ".venv/bin/kvbench", "scripts/bench"})
SHELL_ENDS = frozenset({"|", "||", "&&", ";", "&", ">", ">>", "<", "2>"})
# Options of programs that documents may name beside ours.
FOREIGN_OPTIONS = ("--benchmark-",)
# Options typer adds by itself; they explain themselves.
UNDOCUMENTED = frozenset({"--help", "--install-completion", "--show-completion"})
PLACEHOLDER = re.compile(r"\.\.\.|…|^[A-Z][A-Z0-9_|~,/.]*$|[\[\]<>]")
FENCE = re.compile(r"^\s*(`{3,}|~{3,})")
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
TABLES = {"command": "commands", "metric": "metrics", "status": "statuses", "run status": "run_statuses"}


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its options (each name, whether it takes a value), and what its plain arguments are."""

    options: Mapping[str, bool]
    takes_arguments: bool = False
    takes_selects: bool = False
    leading: int = 0  # plain words before the first SELECT (the run selector of `show`)


@dataclass(frozen=True, slots=True)
class Surface:
    """What the application offers. ``commands`` holds subcommands by their full name (``db upgrade``)."""

    commands: Mapping[str, Command]
    suites: Suites
    metrics: frozenset[str]
    statuses: frozenset[str]
    run_statuses: frozenset[str]
    plugin_options: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of_application(cls) -> Surface:
        """Read the typer application, the suites and the result record of this tree."""
        import typer.main

        from kvbench.cli.main import app
        from kvbench.contract.discover import load_suites
        from kvbench.contract.result import RUN_STATUSES, STATUSES

        suites = load_suites()
        benches = [bench for members in suites.benches.values() for bench in members.values()]
        plugin = ROOT / "kvbench/plugin.py"
        return cls(
            commands=dict(_commands(typer.main.get_command(app), "")),
            suites=suites,
            metrics=frozenset(m for b in benches for m in (b.metric, *b.extra_metrics)),
            statuses=frozenset(STATUSES),
            run_statuses=frozenset(RUN_STATUSES),
            plugin_options=frozenset(re.findall(r"\"(--kvbench-[a-z-]+)\"", plugin.read_text()))
            if plugin.is_file()
            else frozenset(),
        )

    @property
    def options(self) -> frozenset[str]:
        """Every option name of every command and of the pytest plugin."""
        return frozenset(o for c in self.commands.values() for o in c.options) | self.plugin_options


def _commands(node: object, name: str) -> Iterator[tuple[str, Command]]:
    """Yield ``node`` (a command or group as click builds it, which typer carries inside) and its subcommands."""
    parameters = getattr(node, "params", [])
    options = {
        text: not getattr(p, "is_flag", False)
        for p in parameters
        if p.param_type_name == "option"
        for text in (*p.opts, *p.secondary_opts)
    }
    options |= dict.fromkeys(("-h", "--help"), False)
    arguments = [p for p in parameters if p.param_type_name == "argument"]
    words = [f"{p.name} {p.metavar or ''}".lower() for p in arguments]
    selects = any(re.search(r"\bselects?\b", text) for text in words)
    leading = next((i for i, text in enumerate(words) if re.search(r"\bselects?\b", text)), 0)
    yield name, Command(options, bool(arguments), selects, leading)
    for child, member in (getattr(node, "commands", None) or {}).items():
        yield from _commands(member, f"{name} {child}".strip())


@dataclass(frozen=True, slots=True)
class Snippet:
    """A piece of code in a document: ``where`` is FILE:LINE, ``block`` whether it stands in a code block."""

    where: str
    text: str
    block: bool


def snippets(name: str, text: str) -> Iterator[Snippet]:
    """Yield the lines of code blocks (continued lines joined) and the inline code of Markdown ``text``."""
    fence, pending, begin = "", "", 0
    for number, line in enumerate(text.splitlines(), 1):
        mark = FENCE.match(line)
        if mark and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
            pending = ""
        elif fence:
            begin = begin if pending else number
            pending += line.strip()
            if pending.endswith("\\"):
                pending = pending[:-1] + " "
                continue
            yield Snippet(f"{name}:{begin}", pending, True)
            pending = ""
        else:
            for found in INLINE.finditer(line):
                yield Snippet(f"{name}:{number}", found[1].strip(), False)


def tables(name: str, text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (FILE:LINE, heading of the first column, name) for each name in code in the first column of a table."""
    heading = ""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.lstrip().startswith("|"):
            heading = ""
            continue
        first = line.strip().strip("|").split("|")[0].strip()
        if not heading:
            heading = first.lower() or "-"
            continue
        for found in INLINE.finditer(first):
            yield f"{name}:{number}", heading, found[1]


def words_of(line: str) -> list[str] | None:
    """Return the words after the program of a kvbench line, None for any other line.

    Raises ValueError on unbalanced quotes. ``scripts/bench`` words are returned as the kvbench words it runs.
    """
    lexer = shlex.shlex(re.sub(r"^\$ ", "", line), posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    if not re.match(r"(?:[A-Z_]+=\S* )*(?:\S*/)?(?:kvbench|bench)(?:\s|$)", re.sub(r"^\$ ", "", line)):
        return None
    words: list[str] = []
    for word in lexer:
        if word in SHELL_ENDS:
            break
        words.append(word)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return words if words and words[0] in PROGRAMS else None


def check_line(words: list[str], surface: Surface) -> Iterator[str]:
    """Yield what is wrong with one command line, the program being its first word."""
    program, *rest = words
    if program == "scripts/bench":
        if not rest:
            return
        if rest[0] not in surface.commands and rest[0] not in ("-h", "--help", "--version"):
            rest = ["run", *rest]
    name = ""
    while rest and f"{name} {rest[0]}".strip() in surface.commands:
        name = f"{name} {rest.pop(0)}".strip()
    if rest and not name and not rest[0].startswith("-"):
        if not PLACEHOLDER.search(rest[0]):
            yield f"no command {rest[0]!r}"
        return
    command = surface.commands[name]
    plain: list[str] = []
    axes: list[str] = []
    while rest:
        word = rest.pop(0)
        if PLACEHOLDER.search(word):
            continue
        if not re.match(r"--?[A-Za-z]", word):
            plain.append(word)
            continue
        option, equals, value = word.partition("=")
        if option not in command.options:
            yield f"{name or 'kvbench'} has no option {option}"
            return
        if command.options[option]:
            if not equals and not rest:
                yield f"{option} of {name} needs a value"
            value = value if equals else rest.pop(0) if rest else ""
            if option in ("-a", "--axis"):
                axes.append(value)
    if plain and not command.takes_arguments:
        yield f"{name or 'kvbench'} takes no argument {plain[0]!r}"
    if command.takes_selects:
        yield from check_selection(plain[command.leading :], axes, surface.suites)


def check_selection(selects: list[str], axes: list[str], suites: Suites) -> Iterator[str]:
    """Yield what is wrong with SELECT words and ``AXIS=V1,V2`` words, as ``kvbench run`` would find it."""
    from kvbench.errors import UsageError

    try:
        benches = suites.select(selects)
        for word in axes:
            axis, equals, values = word.partition("=")
            if not equals:
                yield f"-a {word!r} is not AXIS=VALUE"
                continue
            for bench in benches:
                if axis not in bench.axes:
                    yield f"{bench.suite}/{bench.name} has no axis {axis!r}"
                elif not PLACEHOLDER.search(values):
                    bench.axes[axis].parse_list(values, f"-a {axis}")
    except UsageError as error:
        yield str(error)


def problems(documents: Mapping[str, str], surface: Surface) -> list[str]:
    """Return one line per problem of ``documents`` (name: Markdown text) against ``surface``."""
    found: list[str] = []
    named: set[str] = set()
    for name, text in documents.items():
        for snippet in snippets(name, text):
            named.add(snippet.text)
            try:
                words = words_of(snippet.text)
            except ValueError as error:
                found.append(f"{snippet.where}: {snippet.text!r}: {error}")
                continue
            if words is not None:
                named.update(word.partition("=")[0] for word in words)
                named.update(" ".join(words[1 : 1 + n]) for n in (1, 2))
                found += [f"{snippet.where}: {text}" for text in check_line(words, surface)]
            elif not snippet.block and re.fullmatch(r"--[a-z][a-z-]*([= ].*)?", snippet.text):
                option = re.split("[= ]", snippet.text)[0]
                named.add(option)
                if option not in surface.options and not option.startswith(FOREIGN_OPTIONS):
                    found.append(f"{snippet.where}: no command has the option {option}")
        for where, heading, entry in tables(name, text):
            if heading in TABLES:
                word = entry.removeprefix("kvbench ") if heading == "command" else entry
                if word not in getattr(surface, TABLES[heading]):
                    found.append(f"{where}: no {heading} {word!r}")
    found += [f"no document names the command `kvbench {c}`" for c in sorted(surface.commands) if c and c not in named]
    long_options = {o for o in surface.options if o.startswith("--")} - UNDOCUMENTED
    found += [f"no document names the option `{o}`" for o in sorted(long_options - named)]
    found += [f"no document names the metric `{m}`" for m in sorted(surface.metrics - named)]
    found += [f"no document names the status `{s}`" for s in sorted((surface.statuses | surface.run_statuses) - named)]
    return found


def documents(root: Path = ROOT) -> dict[str, str]:
    """Return README.md and docs/**/*.md of ``root`` by relative path; raises FileNotFoundError without a README.md."""
    paths = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}


def main() -> int:
    """Print one line per problem and how much was checked; return 1 when there is one."""
    sys.path.insert(0, str(ROOT))  # as a script the first entry is tests/, and kvbench may not be installed
    surface = Surface.of_application()
    try:
        texts = documents()
    except FileNotFoundError as error:
        print(f"docs: {error.filename} is missing")
        return 1
    found = problems(texts, surface)
    print(*found, sep="\n", end="\n" if found else "")
    lines = sum(words_of(s.text) is not None for name, text in texts.items() for s in snippets(name, text))
    print(f"docs: {len(texts)} documents, {lines} kvbench lines, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
