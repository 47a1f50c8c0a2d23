"""What the guest's programs can do without a network: compile, interpret, keep versions."""

from __future__ import annotations

import pytest

from tests.vm.live_service import Machine

pytestmark = [pytest.mark.vm, pytest.mark.root]


def test_a_c_program_is_compiled_and_run(shared_vm: Machine) -> None:
    source = (
        "#include <stdio.h>\n"
        "static long fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }\n"
        'int main(void) { for (int n = 0; n < 10; n++) printf("%ld ", fib(n)); puts(""); return 7; }\n'
    )
    shared_vm.write("c/fib.c", source.encode())
    job = shared_vm.run("gcc -O2 -Wall -Werror -o fib fib.c && ./fib", cwd="c")
    assert job["stderr"] == b""
    assert (job["stdout"], job["exit_code"]) == (b"0 1 1 2 3 5 8 13 21 34 \n", 7)


def test_make_builds_from_several_files(shared_vm: Machine) -> None:
    shared_vm.text(
        "mkdir -p m && cd m && printf 'int two(void) { return 2; }\\n' > two.c\n"
        "printf 'int two(void);\\nint main(void) { return two(); }\\n' > main.c\n"
        "printf 'main: main.o two.o\\n' > Makefile && make -s"
    )
    assert shared_vm.run("./main", cwd="m")["exit_code"] == 2


def test_python_runs_scripts_and_its_standard_library(shared_vm: Machine) -> None:
    shared_vm.write(
        "script.py",
        b"import sqlite3, ssl, json, ctypes\n"
        b"print(json.dumps(sqlite3.connect(':memory:').execute('select 6*7').fetchone()))\n",
    )
    assert shared_vm.text("python3 script.py") == "[42]\n"


def test_node_runs_scripts(shared_vm: Machine) -> None:
    text = shared_vm.text("node -e 'setTimeout(() => console.log([1, 2, 3].map(x => x ** 2).join()), 1)'")
    assert text == "1,4,9\n"


def test_git_keeps_and_shows_history(shared_vm: Machine) -> None:
    text = shared_vm.text(
        "git init -q -b main repo && cd repo\n"
        "git config user.email a@example.org && git config user.name A\n"
        "echo one > file && git add file && git commit -qm first\n"
        "echo two >> file && git commit -qam second && git log --format=%s\n"
        "git diff HEAD~1 --stat | tail -1 && git clone -q . ../clone && cat ../clone/file"
    )
    assert text == "second\nfirst\n 1 file changed, 1 insertion(+)\none\ntwo\n"


def test_the_promised_programs_are_there(shared_vm: Machine) -> None:
    names = "python3 node git bash gcc make curl jq less ps ip"
    assert shared_vm.text(f"for name in {names}; do command -v $name > /dev/null || echo $name; done") == ""
    assert shared_vm.text("""echo '{"a": [1, 2]}' | jq -c .a""") == "[1,2]\n"
    assert shared_vm.text("ls /etc/ssl/certs/ca-certificates.crt") == "/etc/ssl/certs/ca-certificates.crt\n"


def test_there_is_no_network_but_loopback(shared_vm: Machine) -> None:
    assert shared_vm.text("ls /sys/class/net") == "lo\n"
    assert shared_vm.run("curl -sS -m 5 http://192.0.2.1/")["exit_code"] == 7
