import json
import math
import subprocess
import sys

import pytest

from fncore.errors import UserError
from fncore.text.tasks import is_heldout, load_task

SMALL = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


@pytest.fixture
def write(tmp_path):
    def write(*records):
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(map(json.dumps, records)))
        return str(path)

    return write


def chain_sum(seed=0, **config):
    return load_task("chain_sum", config={**SMALL, **config}, seed=seed)


def question(example):
    return example.prompt[-1]["content"]


def test_an_example_is_a_function_of_seed_and_position():
    task, again, other = chain_sum(seed=1), chain_sum(seed=1), chain_sum(seed=2)
    positions = [0, 7, 2**31, 2**40, 2**80]
    assert [task.train(p) for p in positions] == [again.train(p) for p in reversed(positions)][::-1]
    assert [task.train(p).index for p in range(20)] != [other.train(p).index for p in range(20)]
    with pytest.raises(ValueError, match="position"):
        task.train(-1)


def test_no_seed_trains_on_a_held_out_problem():
    heldout = {question(example) for example in chain_sum(seed=5).heldout(200)}
    assert len(heldout) == 200
    for seed in range(5):
        task = chain_sum(seed=seed)
        assert task.heldout(200) == chain_sum(seed=seed + 9).heldout(200)
        assert heldout.isdisjoint(question(task.train(position)) for position in range(300))


def test_held_out_problems_keep_their_order_and_are_a_tenth():
    task = chain_sum()
    assert task.heldout(50)[:20] == task.heldout(20)
    assert task.heldout(0) == []
    share = sum(is_heldout(f"question {number}") for number in range(10_000)) / 10_000
    assert 0.09 < share < 0.11
    assert is_heldout(" What  IS\n1?") == is_heldout("what is 1?")


def test_too_few_distinct_problems_is_an_error():
    with pytest.raises(UserError, match=r"1000 held-out ones were asked for, \d+ found"):
        chain_sum(max_digits=1).heldout(1000)


def test_answer_and_system_message():
    example = load_task("chain_sum", config=SMALL, seed=0, system="Be brief.").train(3)
    assert example.prompt[0] == {"role": "system", "content": "Be brief."}
    assert eval(question(example).split(":")[1].strip(" =")) == int(example.answer)


@pytest.mark.parametrize(
    ("task", "config", "parts"),
    [
        ("chain_summ", {}, ["'chain_summ'", "'chain_sum'", ".jsonl"]),
        ("chain_sum", {"min_term": 2}, ["'min_term'", "'min_terms'", "max_digits"]),
        ("chain_sum", {"seed": 2}, ["'seed'"]),
        ("chain_sum", {"min_terms": "2"}, ["'min_terms'", "'2'", "int"]),
        ("chain_sum", {"min_terms": True}, ["'min_terms'", "True"]),
        ("chain_sum", {"min_terms": 9, "max_terms": 3}, ["max_terms must be >= min_terms"]),
        ("chain_sum", [1], ["[1]", "object"]),
        ("nothing.jsonl", {}, ["nothing.jsonl", "can't be read"]),
    ],
)
def test_a_bad_task_or_option_is_named(task, config, parts):
    with pytest.raises(UserError) as caught:
        load_task(task, config=config, seed=0)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["acre", "word_ladder", "gsm_symbolic", "graph_color", "pool_matrix"])
def test_datasets_that_prepare_their_entries_or_name_no_answer(name):
    task = load_task(name, config={}, seed=0)
    assert task.train(2**40) == load_task(name, config={}, seed=0).train(2**40)


def test_the_spellings_of_a_record(write):
    user = {"role": "user", "content": "2 + 2?"}
    system = {"role": "system", "content": "Count."}
    path = write(
        {"prompt": "2 + 2?", "answer": 4, "source": "x"},
        {"prompt": [system, user], "answer": " 4 "},
        {"question": "2 + 2?", "answer": "We add. #### 5?\n#### 4"},
        {"conversations": [user, {"role": "assistant", "content": ""}], "gt": ["4"]},
        {"messages": [user], "gt": ["4", "four"]},
        {"messages": [user]},
    )
    task = load_task(path, config={}, seed=0, system="Add.")
    examples = sorted((task.train(position) for position in range(6)), key=lambda example: example.index)
    assert [example.answer for example in examples] == ["4", "4", "4", "4", "4, four", ""]
    assert [example.index for example in examples] == list(range(6))
    assert examples[1].prompt == [system, user]
    assert all(e.prompt == [{"role": "system", "content": "Add."}, user] for e in examples if e.index != 1)


def test_each_epoch_is_a_permutation_of_what_is_not_held_out(write):
    path = write(*({"question": f"question {number % 150}?", "answer": number} for number in range(200)))
    task = load_task(path, config={}, seed=3)
    heldout = {question(example) for example in task.heldout(1000)}
    assert len(task.heldout(1000)) == len(heldout) > 5
    train = {number for number in range(200) if f"question {number % 150}?" not in heldout}
    size = len(train)
    epochs = [[task.train(size * epoch + offset).index for offset in range(size)] for epoch in (0, 1, 2**40)]
    assert all(set(epoch) == train and len(epoch) == size for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert task.train(size + 5) == load_task(path, config={}, seed=3).train(size + 5)
    assert load_task(path, config={}, seed=4).heldout(1000) == task.heldout(1000)
    assert [load_task(path, config={}, seed=4).train(p).index for p in range(size)] != epochs[0]


def test_a_file_of_held_out_problems_alone_is_an_error(write):
    held = next(f"question {number}" for number in range(1000) if is_heldout(f"question {number}"))
    with pytest.raises(UserError, match="all of its 1 records are held out"):
        load_task(write({"question": held, "answer": 1}), config={}, seed=0)


@pytest.mark.parametrize(
    ("record", "value"),
    [
        ({"prompt": None, "answer": "4"}, "None"),
        ({"prompt": " ", "answer": "4"}, "' '"),
        ({"prompt": [], "answer": "4"}, "[]"),
        ({"prompt": [{"role": "assistant", "content": ""}], "answer": "4"}, "assistant"),
        ({"prompt": [{"role": "human", "content": "a"}], "answer": "4"}, "'human'"),
        ({"prompt": [{"role": "user", "content": None}], "answer": "4"}, "None"),
        ({"question": ["a"], "answer": "4"}, "['a']"),
        ({"prompt": "a"}, '"answer" is None'),
        ({"prompt": "a", "answer": None}, '"answer" is None'),
        ({"prompt": "a", "answer": True}, "True"),
        ({"prompt": "a", "answer": {}}, "{}"),
        ({"prompt": "a", "answer": math.nan}, "nan"),
        ({"prompt": "a", "answer": [1.5, -math.inf]}, "-inf"),
        ({"question": "a", "answer": "so ####  "}, "so ####"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "'b'"),
        ({"messages": "a"}, "'a'"),
        ({"text": "a"}, "'text'"),
    ],
)
def test_a_bad_record_is_named(write, record, value):
    path = write({"prompt": "1 + 1?", "answer": 2}, record)
    with pytest.raises(UserError, match=r"prompts\.jsonl, line 2.*expected") as caught:
        load_task(path, config={}, seed=0)
    assert value in str(caught.value)


def test_a_file_has_no_options(write):
    with pytest.raises(UserError, match="'max_terms'"):
        load_task(write({"prompt": "a", "answer": 1}), config={"max_terms": 3}, seed=0)


def test_tasks_need_neither_torch_nor_transformers():
    code = "import sys, fncore.text.tasks as t; t.load_task('chain_sum', config={}, seed=0); "
    code += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
