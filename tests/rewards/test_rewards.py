import hashlib
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from algorithms.rewards.scorer import RewardError, Sample, Scorer, combine, grade
from algorithms.rewards.shaping import overlong_penalty
from algorithms.rewards.verifiers import RefusedCode, _has_nan, extract_answer, judging, verifier
from fncore.errors import UserError
from fncore.text.tasks import Example, load_task

FILE = {"kind": "jsonl", "path": "unused.jsonl"}
PROMPT = [{"role": "user", "content": "6 * 7?"}]
FUNCTIONS = """
import math, os, sys, time

def length(prompt, completion, answer): return len(completion)
def echo(prompt, completion, answer):
    return float(completion == "\\ud800 \\U0001f600 \\x00\\n" and prompt[0]["content"] == "6 * 7?")
def heavy(prompt, completion, answer): return "torch" in sys.modules or "transformers" in sys.modules
def failing(prompt, completion, answer): raise KeyError("no such thing")
def hanging(prompt, completion, answer): time.sleep(60 if completion == "bad" else 0); return 1
def spinning(prompt, completion, answer): return 9 ** 9 ** 9 if completion == "bad" else 1
def dying(prompt, completion, answer): os._exit(3)
def leaving(prompt, completion, answer): sys.exit(3)
def nan(prompt, completion, answer): return math.nan
def infinite(prompt, completion, answer): return -math.inf
def text(prompt, completion, answer): return "1.0"
def nothing(prompt, completion, answer): pass
def enormous(prompt, completion, answer): return 10 ** 400
def printing(prompt, completion, answer):
    print('{"score": 99}'); os.write(1, b'{"score": 98}\\n'); os.system("echo '{}'"); sys.stdin.read()
    return 0.25
def needing(prompt, completion, answer, tokenizer): return 0
number = 3
"""


def sample(completion, *, answer="42", index=0):
    return Sample(PROMPT, completion, answer, index)


@pytest.fixture
def functions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my_rewards.py"
    path.write_text(FUNCTIONS)
    (tmp_path / "random.py").write_text("raise RuntimeError('stands in for the real one')")
    return path


@pytest.fixture(scope="module")
def math_verify():
    return verifier("math", FILE)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (" 42 ", "42"),
        ("so <answer> 41 </answer>, no, <answer>\n42\n</answer>.", "42"),
        ("<think><answer>41</answer></think>\n\n42", "42"),
        ("<answer>42", "<answer>42"),
        ("<answer>" * 300_000, "<answer>" * 300_000),
    ],
)
def test_extract_answer(completion, expected):
    assert extract_answer(completion) == expected


@pytest.mark.parametrize(
    ("answer", "completion", "score"),
    [
        ("42", "42", 1),
        ("42", "The answer is 42.", 1),
        ("42", r"so $\boxed{42}$", 1),
        ("42", "<answer>42.0</answer>", 1),
        ("42", "<think>it is 41</think>42", 1),
        ("42", "43", 0),
        ("42", "", 0),
        ("", "42", 0),
        ("86", "30 degrees Celsius are 86 Fahrenheit", 1),
        ("86", "30 degrees Celsius are 54 Fahrenheit", 0),
        ("1,234", "1234", 1),
        ("1/2", "<answer>0.5</answer>", 1),
        (r"\frac{1}{2}", "it is 0.5", 1),
        ("x + 1", "<answer>1 + x</answer>", 1),
        ("x + 1", "<answer>1 - x</answer>", 0),
        ("yes", "<answer>yes</answer>", 1),
        ("1", "<answer>1 - x</answer>", 0),
        (r"\sin(x)", "<answer>sin(x)</answer>", 0),
        (r"2\sqrt{3}", r"<answer>\sqrt{12}</answer>", 1),
        ("72", "<answer>72 apples</answer>", 1),
        ("18", "<answer>$18.00 per day</answer>", 1),
        ("(1, 2)", "<answer>(2, 1)</answer>", 0),
        ("42", "x" * 100_000 + " 42", 1),
        ("42", "42 " + "x" * 100_000, 0),
        ("42", "\ud800", 0),
        ("42", "9**9**9**9", 0),
        ("42", "<answer>9^{9^{9^9}}</answer>", 0),
        ("42", "<answer>2**99999999999</answer>", 0),
        ("25", r"3^2 + 4^2 is $\boxed{25}$", 1),
        ("42", "(" * 1900, 0),
        ("42", "$" + r"\frac{" * 300, 0),
    ],
)
def test_math(math_verify, answer, completion, score):
    began = time.monotonic()
    assert math_verify(PROMPT, completion, answer, 0) == score
    assert time.monotonic() - began < 2


def test_chain_sum_verifier():
    task = load_task("chain_sum", config={"max_terms": 2, "max_digits": 2}, seed=0)
    score = verifier("task", task.spec())
    for position in range(10):
        example = task.train(position)
        rows = {f"<answer>{example.answer}</answer>": 1, f"<think>hm</think>{example.answer}.00": 1, "none": 0, "": 0}
        for completion, expected in rows.items():
            assert score(example.prompt, completion, example.answer, example.index) == expected


@pytest.mark.parametrize("reply", ["nan", "NaN", "-nan", "nanj", "nan+nani", "n an", "3 - nan i", "(nan)"])
def test_not_a_number_is_no_answer(reply):
    example = (task := load_task("complex_arithmetic", config={}, seed=0)).train(0)
    score = verifier("task", task.spec())
    assert score(example.prompt, example.answer, example.answer, example.index) == 1
    for completion in (reply, f"<answer>{reply}</answer>"):
        assert score(example.prompt, completion, example.answer, example.index) == 0


def test_not_a_number_is_found_in_numbers_alone():
    assert not any(map(_has_nan, ["banana", "in an hour", "finance", "1n", "Nantes"]))


@pytest.mark.parametrize(
    ("name", "completion"),
    [
        ("spiral_matrix", "[{code}]"),
        ("string_insertion", "[{code}]"),
        ("binary_matrix", "[{code}]"),
        ("n_queens", "{code}"),
        ("countdown", "{code}"),
        ("countdown", 'sympify("{code}")'),
        ("puzzle24", "{code}"),
        ("polynomial_multiplication", "{code}"),
        ("simple_integration", "{code}"),
    ],
)
def test_scorers_of_reasoning_gym_run_nothing_that_a_model_wrote(name, completion, tmp_path):
    touched = tmp_path / "touched"
    score = verifier("task", load_task(name, config={}, seed=0).spec())
    code = f"__import__('os').system('touch {touched}')"
    for attack in (code, code.replace("'", '\\"')):
        score(PROMPT, f"<answer>{completion.format(code=attack)}</answer>", "", 0)
    assert not touched.exists()


@pytest.mark.parametrize("name", ["countdown", "polynomial_multiplication", "simple_integration"])
def test_the_guard_lets_right_answers_through(name):
    task = load_task(name, config={}, seed=0)
    score = verifier("task", task.spec())
    for example in (task.train(position) for position in range(5)):
        assert score(example.prompt, example.answer, example.answer, example.index) == 1


def test_the_guard_lets_a_list_through():
    example = (task := load_task("spiral_matrix", config={}, seed=0)).train(0)
    completion = str([int(number) for number in example.answer.split()])
    # The task gives a tenth to a list in Python's notation, which it reads by eval.
    assert verifier("task", task.spec())(example.prompt, completion, example.answer, example.index) == 0.1


def test_only_formulas_and_literals_run_while_judging():
    with judging():
        assert eval("[1, -2.5, 'a', (True, None), {'b': 2}]")
        for code in (
            "open",
            "().__class__",
            "'{0.real}'.format",
            "[0] * 10**11",
            "f'{1:>99999}'",
            "lambda: 1",
            "[i for i in (1, 2)]",
            "{(i, j) for i in (1, 2) for j in (1, 2)}",
            "(i := 1)",
        ):
            with pytest.raises(RefusedCode):
                eval(code)
        with pytest.raises(RefusedCode):
            exec("import os")
        with pytest.raises(RefusedCode):
            exec("x = 1\ndef f(): pass")
    assert eval("[i for i in (1, 2)]") == [1, 2]


def test_scores_provenance_and_weights(functions, monkeypatch, tmp_path):
    with Scorer(["math", "my_rewards:length", "my_rewards:heavy"], weights=[1, 0.5, 3], task_spec=FILE) as scorer:
        assert scorer.score([]) == []
        first, second = scorer.score([sample("42"), sample("The answer is 41")])
        assert first == {"math": 1.0, "my_rewards:length": 2.0, "my_rewards:heavy": 0.0}
        assert second == {"math": 0.0, "my_rewards:length": 16.0, "my_rewards:heavy": 0.0}
        assert combine(first, scorer.weights) == 2.0
        digest = hashlib.sha256(functions.read_bytes()).hexdigest()
        assert scorer.provenance() == [
            {"name": "math", "weight": 1},
            {"name": "my_rewards:length", "weight": 0.5, "file": str(functions), "sha256": digest},
            {"name": "my_rewards:heavy", "weight": 3, "file": str(functions), "sha256": digest},
        ]
    with pytest.raises(ValueError, match="zip"):
        combine(first, [1.0])


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("failing", "raised KeyError: 'no such thing'"),
        ("hanging", "took longer than"),
        ("spinning", "took longer than"),
        ("dying", "ended its process"),
        ("leaving", "raised SystemExit"),
        ("nan", "returned nan"),
        ("infinite", "returned -inf"),
        ("text", "returned '1.0'"),
        ("nothing", "returned None"),
        ("enormous", "raised OverflowError"),
    ],
)
def test_a_failing_function_stops_the_run_or_gets_the_score_for_errors(functions, name, problem):
    reward = f"my_rewards:{name}"
    rewards = [reward, "my_rewards:length"]
    with Scorer(rewards, weights=[1, 1], task_spec=FILE, timeout=0.5, on_error=-2.0) as scorer:
        assert scorer.score([sample("bad")]) == [{reward: -2.0, "my_rewards:length": 3.0}]
        assert scorer.errors == 1
        (failure,) = scorer.failures()
        for part in (reward, problem, "6 * 7?", "'bad'"):
            assert part in failure
        assert scorer.failures() == []
    with Scorer(rewards, weights=[1, 1], task_spec=FILE, timeout=0.5) as scorer, pytest.raises(RewardError) as caught:
        scorer.score([sample("bad")])
    for part in (reward, problem, "6 * 7?", "'bad'"):
        assert part in str(caught.value)


def test_a_scorer_goes_on_after_a_time_out_and_in_another_thread(functions):
    results = []
    with Scorer(["my_rewards:hanging"], weights=[1], task_spec=FILE, timeout=0.5, on_error=0.0) as scorer:
        samples = [sample("good"), sample("bad"), sample("good")]
        thread = threading.Thread(target=lambda: results.extend(scorer.score(samples)))
        thread.start()
        thread.join()
    assert [scores["my_rewards:hanging"] for scores in results] == [1, 0, 1]


def test_prints_and_odd_text_do_not_disturb_the_protocol(functions):
    with Scorer(["my_rewards:printing", "my_rewards:echo"], weights=[1, 1], task_spec=FILE) as scorer:
        expected = {"my_rewards:printing": 0.25, "my_rewards:echo": 1.0}
        assert scorer.score([sample("\ud800 \U0001f600 \x00\n")] * 2) == [expected] * 2
        assert scorer.score([sample("x" * 1_000_000)])[0]["my_rewards:echo"] == 0.0


def test_a_hostile_completion_scores_zero_and_is_counted():
    with Scorer(["math"], weights=[1], task_spec=FILE, timeout=1.0) as scorer:
        hostile = ["__import__('os').system('exit')", "$1000000000!$", "(9**99)**(9999)**9", "42"]
        assert [scores["math"] for scores in scorer.score([sample(text) for text in hostile])] == [0, 0, 0, 1]
        assert scorer.errors == 2
        assert [failure.split()[1] for failure in scorer.failures()] == ["'math'"] * 2


def test_a_grade_is_the_first_reward(functions):
    with Scorer(["my_rewards:length", "my_rewards:echo"], weights=[0, 1], task_spec=FILE) as scorer:
        assert grade(scorer, [Example(0, PROMPT, "42"), Example(1, PROMPT, "42")], ["four", "2"]) == [4.0, 1.0]


@pytest.mark.parametrize(
    ("reward", "parts"),
    [
        ("maths", ["'maths'", "'math'", "module:function"]),
        ("no_such_module:f", ["no_such_module", "ModuleNotFoundError"]),
        ("my_rewards:lenght", ["'lenght'", "'length'"]),
        ("my_rewards:number", ["3", "function"]),
        ("my_rewards:needing", ["tokenizer"]),
        ("my_rewards:", ["names no function"]),
        ("broken:f", ["SyntaxError"]),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_named_at_the_start(functions, reward, parts):
    functions.with_name("broken.py").write_text("def f(:")
    scorer = Scorer([reward], weights=[1], task_spec=FILE)
    with pytest.raises(UserError) as caught:
        scorer.start()
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"rewards": [], "weights": []},
        {"rewards": ["math", "math"], "weights": [1, 1]},
        {"rewards": ["math"], "weights": [1, 1]},
        {"rewards": ["math"], "weights": [math.nan]},
        {"rewards": ["math"], "weights": [1], "timeout": 0},
        {"rewards": ["math"], "weights": [1], "on_error": math.inf},
    ],
)
def test_arguments_that_do_not_fit_together(arguments):
    with pytest.raises(UserError, match="expected"):
        Scorer(**arguments, task_spec=FILE)


def test_a_function_that_changes_during_the_run_is_an_error(functions):
    with Scorer(["my_rewards:dying"], weights=[1], task_spec=FILE, on_error=0.0) as scorer:
        scorer.score([sample("a")])
        functions.write_text(FUNCTIONS + "\n")
        with pytest.raises(UserError, match="changed"):
            scorer.score([sample("a")])


@pytest.mark.skipif(sys.platform == "win32", reason="looks for processes by POSIX signals")
def test_the_child_ends_with_its_parent_in_the_middle_of_a_verification(functions):
    functions.with_name("slow.py").write_text(
        "import os, time\ndef f(prompt, completion, answer):\n"
        "    open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-c",
            textwrap.dedent(f"""
            import sys; sys.path.insert(0, {os.path.dirname(os.path.dirname(os.path.dirname(__file__)))!r})
            from algorithms.rewards.scorer import Sample, Scorer
            Scorer(["slow:f"], weights=[1], task_spec={FILE!r}, timeout=60).score([Sample([], "a", "b", 0)])
        """),
        ]
    )
    wait_for(lambda: functions.with_name("pid").exists() and functions.with_name("pid").read_text())
    pid = int(functions.with_name("pid").read_text())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not alive(pid))


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return os.path.exists("/proc") is False


def wait_for(condition):
    end = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_overlong_penalty():
    lengths = torch.tensor([[0, 12, 13], [14, 16, 17]])
    expected = torch.tensor([[0.0, 0.0, -0.25], [-0.5, -1.0, -1.0]])
    assert torch.equal(overlong_penalty(lengths, max_length=16, buffer=4), expected)
    assert overlong_penalty(torch.tensor([2**40]), max_length=2**40 + 1, buffer=2).item() == -0.5
    with pytest.raises(ValueError, match="buffer"):
        overlong_penalty(lengths, max_length=16, buffer=17)


@pytest.mark.parametrize(
    ("answer", "completion", "score"),
    [
        ("42", "42", 1.0),
        ("42", "17 + 25 = 42.", 1.0),
        ("42", "The answer is 42, not 24", 0.0),
        ("-7", "2 - 9 = -7", 1.0),
        ("7", "2 - 9 = -7", 0.0),
        ("1000", "It is 1,000", 1.0),
        ("0.5", "0.50", 1.0),
        ("5", "15", 0.0),
        ("42", "no number", 0.0),
        ("42", "<answer>42</answer> of 50", 1.0),
        ("42", "\u0664\u0662", 0.0),
    ],
)
def test_number(answer, completion, score):
    assert verifier("number", {})([], completion, answer, 0) == score
