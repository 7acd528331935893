#!/usr/bin/env python3
"""Lists the external commands that shell scripts, recipes of make, Python and C++ files call: FILE:LINE COMMAND.

    python3 test/scripts/python/list_commands.py FILE...

Shell is tokenized: a command is found wherever the shell looks for one, also in $(...), `...` and <(...), behind `|`, `&&`,
`if`, `!`, in what `trap`, `eval` and `bash -c` get as text, and behind programs that run another (`timeout 5 CMD`,
`xargs`, `env X=1`, `sudo`, `exec`). Of C++ what std::system and popen get is read as shell, as far as it is literal; of
Python what subprocess and os get.

Not listed: functions of the script and of those that it sources or is sourced by, builtins of bash where they are ones (xargs
knows no builtins), programs named by a path within the tree, and names that are only known at run time ($CXX).
"""

import ast
import os
import re
import sys

sys.dont_write_bytecode = True
from shell_commands import BUILTINS, UNKNOWN, Shell, command_of   # noqa: E402


class Lister:
    """Collects (file, line, command) over files that share functions."""

    def __init__(self):
        self.calls, self.functions, self.sources = [], {}, {}
        self.file = None

    def shell(self, text, line=1):
        functions = self.functions.setdefault(self.file, set())

        def found(where, words):
            for command, builtins_too in command_of(words, True):
                name = command[0]
                self.calls.append((self.file, where, name, builtins_too))
                if name in (".", "source") and len(command) > 1:
                    self.sources.setdefault(self.file, set()).add(os.path.basename(command[1]))
                if name in ("bash", "sh") and any(re.fullmatch(r"-[a-z]*c", word) for word in command[1:2]) and len(command) > 2:
                    self.shell(command[2], where)
                if name in ("eval", "trap") and len(command) > 1 and command[1] != "-":
                    self.shell(command[1], where)
                if name.startswith("python3") and command[1:2] == ["-c"] and len(command) > 2:
                    self.python(command[2], where)
        Shell(text, line, found, functions).commands()

    def make(self, text):
        """Recipes, and $(shell ...) anywhere; variables that hold commands are put in their places."""
        variables = dict(re.findall(r"^(\w+) *[:?]?= *(.*)$", re.sub(r"\\\n\s*", " ", text), re.M))
        for match in re.finditer(r"\$\(shell ", text):
            depth, end = 1, match.end()
            while depth and end < len(text):
                depth += (text[end] == "(") - (text[end] == ")")
                end += 1
            self.recipe(text[match.end():end - 1], text.count("\n", 0, match.start()) + 1, variables)
        # In a define that eval reads, dollars are doubled once more.
        text = re.sub(r"^define .*?^endef", lambda match: match[0].replace("$$", "$"), text, flags=re.M | re.S)
        lines, at = text.split("\n"), 0
        while at < len(lines):
            begin, row = at, lines[at]
            while row.endswith("\\") and at + 1 < len(lines):
                at += 1
                row = row[:-1] + " " + lines[at].lstrip()
            at += 1
            value = re.match(r"^\w+ *[:?]?= *(@.*)$", row)
            if row.startswith(("\t", "@")) or value:
                self.recipe((value[1] if value else row).lstrip("\t@+-"), begin + 1, variables)

    def recipe(self, text, line, variables):
        def expand(text, depth):
            out, at = [], 0
            while at < len(text):
                if text.startswith("$$", at):
                    out.append("$")
                    at += 2
                elif text.startswith("$(", at) or text.startswith("${", at):
                    level, end = 1, at + 2
                    while level and end < len(text):
                        level += (text[end] in "({") - (text[end] in ")}")
                        end += 1
                    name = text[at + 2:end - 1]
                    value = variables.get(name)
                    if name == "MAKE":
                        value = "make"
                    out.append(UNKNOWN if value is None or depth > 5 else expand(value, depth + 1))
                    at = end
                elif text[at] == "$":
                    out.append(UNKNOWN)
                    at += 2
                else:
                    out.append(text[at])
                    at += 1
            return "".join(out)
        self.shell(expand(text, 0), line)

    def python(self, text, line=1):
        tree = ast.parse(text.replace(UNKNOWN, "_"))
        lists = {target.id: node.value for node in ast.walk(tree) if isinstance(node, ast.Assign)
                 for target in node.targets if isinstance(target, ast.Name) and isinstance(node.value, (ast.List, ast.Tuple))}

        def literal(node):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                return node.value
            if isinstance(node, ast.JoinedStr):
                return "".join(literal(part) for part in node.values)
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
                return literal(node.left) + literal(node.right)
            return UNKNOWN

        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = ast.unparse(node.func)
            where = line + node.lineno - 1
            first = node.args[0]
            if re.fullmatch(r"subprocess\.(run|Popen|call|check_call|check_output)", name):
                first = lists.get(first.id, first) if isinstance(first, ast.Name) else first
                if isinstance(first, (ast.List, ast.Tuple)):
                    words = [literal(element) for element in first.elts]
                    for command, _ in command_of(words, False):
                        self.calls.append((self.file, where, command[0], False))
                        if command[0] in ("bash", "sh") and command[1:2] == ["-c"] and len(command) > 2:
                            self.shell(command[2], where)
                elif isinstance(first, (ast.Constant, ast.JoinedStr, ast.BinOp)):
                    self.shell(literal(first), where)
            elif name in ("os.system", "os.popen"):
                self.shell(literal(first), where)
            elif re.fullmatch(r"os\.(exec[lv]p?e?|spawn[lv]p?e?|posix_spawnp?)", name):
                self.calls.append((self.file, where, literal(first), False))

    def cpp(self, text):
        """What std::system, popen, execlp, execvp and run_program's second argument get: their literals, as shell."""
        for match in re.finditer(r"\b(?:std::)?(system|popen|exec[lv]p|posix_spawnp|run_program)\(", text):
            depth, end, begin, pieces, arguments = 1, match.end(), match.end(), [], []
            while depth and end < len(text):
                c = text[end]
                string = re.compile(r'"((?:[^"\\\n]|\\.)*)"').match(text, end)
                if string:
                    pieces.append(re.sub(r"\\(.)", r"\1", string[1]))
                    end = string.end()
                    continue
                if text.startswith("//", end):
                    end = text.find("\n", end)
                    continue
                depth += (c in "([{") - (c in ")]}")
                if depth == 0 or (c == "," and depth == 1):
                    # Literals in a call of an unknown function belong to that function.
                    call = re.compile(r"[\s(]*([\w.:]+)\(").match(text, begin)
                    known = not call or call[1].split(":")[-1] in ("formatted", "string")
                    arguments.append("".join(pieces) if known else UNKNOWN)
                    pieces, begin = [], end + 1
                elif name := re.compile(r"[\w.:]+").match(text, end):   # of a function, or a value
                    end = name.end()
                    if not text.startswith("(", end):
                        pieces.append(UNKNOWN)
                    continue
                end += 1
            chosen = arguments[1:2] if match[1] == "run_program" else arguments[:1]
            variable = re.compile(r"\s*(\w+)(\.c_str\(\))?\s*[,)]").match(text, match.end())
            if variable and match[1] != "run_program":   # the text that the variable got last
                values = list(re.finditer(rf"\b{variable[1]} = (?:formatted\()?([^;]*);", text[:match.start()]))
                strings = re.findall(r'"((?:[^"\\\n]|\\.)*)"', values[-1][1].split('",')[0] + '"') if values else []
                chosen = ["".join(re.sub(r"\\(.)", r"\1", string) + UNKNOWN for string in strings)]
            for command in chosen:
                # Formats' {} and what precedes the first literal are unknown: environment settings, at most a program.
                command = re.sub(r"\{[^}]*\}", UNKNOWN, command).lstrip(UNKNOWN + " ")
                command = re.sub(rf"^((?:\w+=\S*\s+)*){UNKNOWN}\s+", r"\1", command)
                self.shell(command, text.count("\n", 0, match.start()) + 1)

    def read(self, path):
        self.file = path
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if path.endswith(".py") or text.startswith("#!/usr/bin/env python3"):
            self.python(text)
        elif path.endswith((".cpp", ".h", ".cu", ".cuh")):
            self.cpp(text)
        elif os.path.basename(path) == "Makefile":
            self.make(text)
        else:
            self.shell(text)

    def listed(self):
        """(file, line, command), each once a line, of what is not the script's own."""
        names = {path: {path} for path in self.functions}
        for path, sourced in self.sources.items():
            for other in self.functions:
                if os.path.basename(other) in sourced:
                    whole = names[path] | names[other]
                    for member in whole:
                        names[member] = whole
        seen = set()
        for path, line, name, builtins_too in self.calls:
            own = set().union(*(self.functions[other] for other in names.get(path, ())))
            if UNKNOWN in name or not name or (builtins_too and (name in BUILTINS or name in own)):
                continue
            if "/" in name and not name.startswith(("/bin/", "/usr/", "/sbin/")):
                continue
            entry = path, line, os.path.basename(name)
            if entry not in seen:
                seen.add(entry)
                yield entry


def main():
    lister = Lister()
    for path in sys.argv[1:]:
        try:
            lister.read(path)
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            sys.exit(f"list_commands.py: {path}: {error}")
    for path, line, name in lister.listed():
        print(f"{path}:{line} {name}")


if __name__ == "__main__":
    main()
