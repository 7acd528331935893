"""Finds the commands in shell code: a tokenizer that follows quotes, substitutions, here-documents and compound commands."""

import os
import re

UNKNOWN = "\0"   # what only the run knows, within a word
LIST = "\1"      # a word that becomes any number of words: $list, "${array[@]}", "$@"

ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(\[[^]]*\])?\+?=")

BUILTINS = set(""". : [ alias bg bind break builtin caller cd command compgen complete compopt continue declare dirs disown echo
    enable eval exec exit export false fc fg getopts hash help history jobs kill let local logout mapfile popd printf pushd
    pwd read readarray readonly return set shift shopt source suspend test times trap true type typeset ulimit umask
    unalias unset wait""".split())
BEFORE_A_COMMAND = {"if", "then", "elif", "else", "while", "until", "do", "!", "{", "time", "coproc"}
NO_COMMAND = {"fi", "done", "esac", "}", "in"}

# Programs that run another: their options that take a value, and the number of words before the command. Those in SHELL
# are builtins, which also run builtins.
RUNNERS = {
    "timeout": ("-k -s --kill-after --signal", 1), "env": ("-u -C -S --unset --chdir", 0), "nice": ("-n", 0), "nohup": ("", 0),
    "xargs": ("-I -n -P -d -L -s -a -E --max-args --max-procs --delimiter", 0), "sudo": ("-u -g -C", 0), "setsid": ("", 0),
    "stdbuf": ("-i -o -e", 0), "taskset": ("-c", 1), "flock": ("-w -E", 1), "chroot": ("", 1), "unshare": ("", 0), "ionice": ("-c -n", 0),
    "setpriv": ("", 0), "exec": ("-a", 0), "command": ("", 0), "builtin": ("", 0), "time": ("-f -o", 0),
}
SHELL = {"exec", "command", "builtin", "time"}


class Shell:
    """Walks a text of shell code; calls found(line, words) for each simple command, words with UNKNOWN in them."""

    def __init__(self, text, line, found, functions):
        self.s, self.at, self.first_line, self.found, self.functions = text, 0, line, found, functions
        self.heredocs, self.arrays = [], {}

    def line(self):
        return self.first_line + self.s.count("\n", 0, self.at)

    def ahead(self, text):
        return self.s.startswith(text, self.at)

    def blanks(self, lines=False):
        while self.at < len(self.s):
            if self.ahead("\\\n"):
                self.at += 2
            elif self.s[self.at] in " \t":
                self.at += 1
            elif self.s[self.at] == "#":
                end = self.s.find("\n", self.at)
                self.at = len(self.s) if end < 0 else end
            elif lines and self.s[self.at] == "\n":
                self.newline()
            else:
                return

    def newline(self):
        self.at += 1
        for mark, quoted, words in self.heredocs:
            body, line = [], self.line()
            while self.at < len(self.s):
                end = self.s.find("\n", self.at)
                end = len(self.s) if end < 0 else end
                row, self.at = self.s[self.at:end], end + 1
                if row.lstrip("\t") == mark:
                    break
                body.append(row)
            text = "\n".join(body)
            if words and os.path.basename(words[0]).startswith("python") and "-" in words[1:2]:
                self.found(line, ["python3", "-c", text])
            elif words and words[0] in ("bash", "sh") and len(words) == 1:
                Shell(text, line, self.found, self.functions).commands()
            elif not quoted:
                inner = Shell(text, line, self.found, self.functions)
                while inner.at < len(inner.s):
                    inner.expansion_or_char()
        self.heredocs = []

    # ---- Words ----

    def word(self):
        """One word from here, None if there is none. Substitutions in it are walked."""
        begin, out, quoted = self.at, [], False
        while self.at < len(self.s):
            c = self.s[self.at]
            if c in " \t\n;&|()<>" and not (c in "<>" and self.s[self.at + 1:self.at + 2] == "("):
                break
            if c in "<>":
                self.at += 2
                self.commands(")")
                out.append(UNKNOWN)
            elif c == "'":
                end = self.s.find("'", self.at + 1)
                out.append(self.s[self.at + 1:end])
                self.at, quoted = end + 1, True
            elif c == '"':
                out.append(self.double_quotes())
                quoted = True
            elif c == "\\":
                out.append("" if self.ahead("\\\n") else self.s[self.at + 1:self.at + 2])
                self.at += 2
            elif self.ahead("$'"):
                self.at += 2
                while self.s[self.at] != "'":
                    self.at += 2 if self.s[self.at] == "\\" else 1
                self.at, quoted = self.at + 1, True
                out.append(UNKNOWN)
            elif c in "*?@+!" and self.s[self.at + 1:self.at + 2] == "(" and self.at > begin:   # extglob
                self.at += 2
                self.skip_to(")")
                out.append(UNKNOWN)
            else:
                out.append(self.expansion_or_char())
        if self.at == begin:
            return None
        text = "".join(out)
        # An array's elements are words like any others.
        if re.fullmatch(r"[A-Za-z_]\w*(\[[^]]*\])?\+?=", text) and self.ahead("("):
            self.at += 1
            elements = []
            while True:
                self.blanks(lines=True)
                if self.at >= len(self.s) or self.ahead(")"):
                    self.at += 1
                    break
                element = self.word()
                if element is None:
                    self.at += 1
                else:
                    elements.append(element)
            self.arrays[re.match(r"\w+", text)[0]] = elements
        self.raw, self.was_quoted = self.s[begin:self.at], quoted
        return text

    def skip_to(self, close):
        """Past the matching parenthesis; substitutions on the way are walked."""
        depth = 1
        while self.at < len(self.s) and depth:
            c = self.s[self.at]
            if c == "\\":
                self.at += 2
            elif c == "'":
                self.at = self.s.find("'", self.at + 1) + 1
            elif c == '"':
                self.double_quotes()
            elif c in "$`":
                self.expansion_or_char()
            else:
                depth += (c == "(") - (c == close)
                self.at += 1

    def double_quotes(self):
        out = []
        self.at += 1
        while self.at < len(self.s) and self.s[self.at] != '"':
            if self.s[self.at] == "\\":
                out.append(self.s[self.at + 1:self.at + 2] if self.s[self.at + 1:self.at + 2] in '"\\$`' else self.s[self.at:self.at + 2])
                self.at += 2
            else:
                out.append(self.expansion_or_char())
        self.at += 1
        return "".join(out)

    def expansion_or_char(self):
        if self.ahead("\\"):
            self.at += 2
            return UNKNOWN
        if self.ahead("`"):
            end = self.at + 1
            while end < len(self.s) and self.s[end] != "`":
                end += 2 if self.s[end] == "\\" else 1
            Shell(self.s[self.at + 1:end].replace("\\`", "`"), self.line(), self.found, self.functions).commands()
            self.at = end + 1
            return UNKNOWN
        if self.ahead("$(("):
            self.at += 3
            self.skip_to(")")
            self.at += 1
            return UNKNOWN
        if self.ahead("$("):
            self.at += 2
            self.commands(")")
            return UNKNOWN
        if self.ahead("${"):
            self.at += 2
            while self.at < len(self.s) and self.s[self.at] != "}":
                if self.s[self.at] == '"':
                    self.double_quotes()
                elif self.s[self.at] == "'" and self.s.find("'", self.at + 1) > 0:
                    self.at = self.s.find("'", self.at + 1) + 1
                else:
                    self.expansion_or_char()
            self.at += 1
            return UNKNOWN
        if self.ahead("$"):
            self.at += len(re.compile(r"\$(\w+|[@*#?$!-])?").match(self.s, self.at)[0])
            return UNKNOWN
        self.at += 1
        return self.s[self.at - 1]

    # ---- Commands ----

    def commands(self, close=None):
        """All commands from here up to `close`, which is ")" or ";;" or the end of the text."""
        while True:
            self.blanks(lines=True)
            if self.at >= len(self.s):
                return
            if close == ")" and self.ahead(")"):
                self.at += 1
                return
            if close == ";;" and (self.ahead(";;") or self.ahead(";&")):
                self.at += 2
                return
            if close == ";;" and re.compile(r"esac\b").match(self.s, self.at):
                return
            if self.ahead("(("):
                self.at += 2
                self.skip_to(")")
                self.at += 1
            elif self.ahead("("):
                self.at += 1
                self.commands(")")
            elif self.s[self.at] in ";&|":
                self.at += 1
            elif self.s[self.at] == ")":   # ours is not the one that opened it
                self.at += 1
            else:
                self.simple()

    def simple(self):
        words, line = [], None
        while True:
            self.blanks()
            if self.at >= len(self.s) or self.s[self.at] in ";|\n)" or (self.s[self.at] == "&" and not self.ahead("&>")):
                break
            redirection = re.compile(r"(\d+|\{\w+\})?(<<<|<<-?|<>|<&|>&|&>>|&>|>>|>\||<(?!\()|>(?!\())").match(self.s, self.at)
            if redirection:
                self.at = redirection.end()
                self.blanks()
                target = self.word()
                if redirection[2] in ("<<", "<<-"):
                    self.heredocs.append((target, self.was_quoted or "\\" in self.raw, words))
                continue
            if self.ahead("("):   # name ()
                self.at += 1
                self.blanks()
                if len(words) == 1 and self.ahead(")"):
                    self.at += 1
                    self.functions.add(words[0])
                    return
                self.commands(")")
                return
            here = self.line()
            word = self.word()
            if word is None:
                self.at += 1
                continue
            if not words and ASSIGNMENT.match(self.raw):
                continue
            if not words and not self.was_quoted:
                if word in BEFORE_A_COMMAND:
                    continue
                if word in NO_COMMAND:
                    continue
                if word == "[[":
                    end = re.compile(r"\s\]\](?=[\s;&|)]|$)")
                    stop = end.search(self.s, self.at)
                    inner = Shell(self.s[self.at:stop.start()], here, self.found, self.functions)
                    while inner.at < len(inner.s):
                        if inner.s[inner.at] == "'":
                            inner.at = inner.s.find("'", inner.at + 1) + 1
                        else:
                            inner.double_quotes() if inner.s[inner.at] == '"' else inner.expansion_or_char()
                    self.at = stop.end()
                    return
                if word in ("for", "select"):
                    self.blanks()
                    if self.ahead("(("):
                        self.at += 2
                        self.skip_to(")")
                        self.at += 1
                    else:
                        while self.at < len(self.s) and self.s[self.at] not in ";\n":
                            self.blanks()
                            if self.word() is None and self.s[self.at:self.at + 1] not in (";", "\n"):
                                self.at += 1
                    return
                if word == "function":
                    self.blanks()
                    self.functions.add(self.word())
                    return
                if word == "case":
                    self.case()
                    return
            line = line or here
            words += self.elements(word)
        if words:
            self.found(line, words)

    def elements(self, word):
        """What the shell makes of a word: those of an array that is known; LIST, or the word."""
        array = re.fullmatch(r'"?\$(?:\{(\w+)\[[@*]\]\}|[@*])"?', self.raw)
        if array:
            return self.arrays.get(array[1]) or [LIST]
        return [LIST] if word == UNKNOWN and not self.was_quoted and self.raw.startswith("$") else [word]

    def case(self):
        self.blanks()
        self.word()
        self.blanks(lines=True)
        self.word()   # in
        while True:
            self.blanks(lines=True)
            if self.at >= len(self.s):
                return
            if re.compile(r"esac\b").match(self.s, self.at):
                self.at += 4
                return
            if self.ahead("("):
                self.at += 1
            self.skip_to(")")   # the pattern
            self.commands(";;")


def command_of(words, builtins_too):
    """Yields (words, whether builtins count there) for each program that a simple command starts: it, and what it runs."""
    if not words or words[0] == LIST:
        return
    yield words, builtins_too
    name, rest = words[0], words[1:]
    if name == "find":
        for at, word in enumerate(rest):
            if word in ("-exec", "-execdir", "-ok"):
                yield from command_of(rest[at + 1:], False)
    if os.path.basename(name) not in RUNNERS or (name == "command" and rest[:1] in (["-v"], ["-V"])):
        return
    with_value, positional = RUNNERS[os.path.basename(name)]
    while rest:
        if rest[0] in with_value.split():
            rest = rest[2:]
        elif rest[0] == LIST or rest[0].startswith("-") or ASSIGNMENT.match(rest[0]):
            rest = rest[1:]
        elif positional:
            positional, rest = positional - 1, rest[1:]
        else:
            break
    yield from command_of(rest, builtins_too and name in SHELL)
