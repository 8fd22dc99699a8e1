"""The floors as data, and how points are held against them."""

import math

import pytest

from bench import floors, report


def point(shape="5120x12288", bits=4.0, rows=1, form="exact", codebook="mcg", **values):
    base = {"shape": shape, "bits": bits, "codebook": codebook, "rows": rows, "form": form}
    return {**base, "kernel": "auto", "us": 10.0, **values}


def required(shape, bits, rows, metric, form="exact"):
    """The strictest floor of a cell, by looking through the table."""
    fitting = [
        f.at_least
        for f in floors.FLOORS
        if shape in f.shapes and bits in f.bits and rows in f.rows
        if (f.metric, f.form) == (metric, form)
    ]
    return max(fitting, default=None)


def test_the_table_says_what_was_asked_for():
    wide = {1: 2.0, 16: 2.0, 32: 2.2, 128: 2.2, 256: 1.5, 512: 1.15, 2048: 1.10, 8192: 1.05}
    small = {1: 1.7, 16: 1.7, 32: 1.7, 128: 1.7, 256: 1.2, 512: 1.2, 2048: 1.10, 8192: 1.05}
    for bits in (4, 6):
        for shape in ("5120x12288", "17408x5120"):
            for rows, ratio in wide.items():
                assert required(shape, bits, rows, "exllamav3") == ratio
            assert required(shape, bits, 8, "torch") == 1.0
            assert required(shape, bits, 32, "torch") is None
        for rows, ratio in small.items():
            assert required("4096x2048", bits, rows, "exllamav3") == ratio
        for shape in floors.ALL:
            assert required(shape, bits, 2048, "torch") == pytest.approx(1 / 1.15)
            assert required(shape, bits, 8192, "torch") == pytest.approx(1 / 1.08)
    for bits, share in ((4, 0.46), (6, 0.65), (8, 0.88)):
        assert required("17408x5120", bits, 1, "ruler") == share
    assert required("17408x5120", 4, 1, "ruler", "fast") == 0.55


def test_cells_are_sorted_by_what_is_missing():
    points = [
        point(ratios={"exllamav3": 2.5, "torch": 0.9}, ruler_share=0.5),
        point(rows=256, ratios={"exllamav3": 1.2}),
        point(rows=1, kernel="16", ratios={"exllamav3": 0.1}),
        point(rows=32, codebook="mul1", ratios={"exllamav3": 0.1}),
        point(rows=64, form="fast", ratios={"exllamav3": 0.1}),
    ]
    cells = floors.evaluate(points)
    measured = [cell for cell in cells if cell.value is not None]
    assert [(c.floor.metric, c.rows, c.verdict) for c in measured] == [
        ("exllamav3", 256, "MISS"),
        ("torch", 1, "MISS"),
        ("ruler", 1, "pass"),
        ("exllamav3", 1, "pass"),
    ]
    assert measured[0].margin == pytest.approx(1.2 / 1.5)
    assert all(cell.verdict == "not measured" for cell in cells[len(measured) :])
    assert len(cells) == sum(len(f.shapes) * len(f.bits) * len(f.rows) for f in floors.FLOORS)


def test_a_point_that_failed_is_no_pass():
    failed = point(rows=1)
    del failed["us"]
    assert all(cell.value is None for cell in floors.evaluate([{**failed, "problem": "wrong"}]))


def test_means_are_geometric_and_by_class():
    points = [
        point(rows=1, ratios={"exllamav3": 2.0, "torch": 1.0}),
        point(rows=16, ratios={"exllamav3": 8.0, "torch": 1.0}),
        point(rows=24, ratios={"exllamav3": 100.0}),
        point(rows=512, ratios={"torch": 0.5}),
    ]
    means = {row["rows"]: row for row in floors.class_means(points)}
    assert means["1 to 16"]["exllamav3"] == pytest.approx(4.0)
    assert means["1 to 16"]["points"] == 2
    assert "exllamav3" not in means["256, 512"] and means["256, 512"]["torch"] == 0.5
    assert len(means) == 2, "24 rows belong to no class"
    assert math.isnan(floors.geometric_mean([]))


def test_the_summary_opens_with_the_worst_cell():
    points = [
        point(ratios={"exllamav3": 3.0, "torch": 2.0}, ruler_share=0.3),
        point(rows=64, ratios={"exllamav3": 2.1}),
    ]
    lines = report.summary_lines(points, ["17408x5120 4 bit mcg 3 rows: relative error 1"])
    assert lines[0].startswith("worst cell: 5120x12288 4 bit mcg exact, 1 rows: 0.300 of the read")
    assert lines[1].startswith("FAILED 17408x5120")
    assert "2 of 4 measured cells pass" in lines[2]
    assert [line for line in lines if line.startswith("MISS")][1].endswith("(0.95 of it)")


def test_tables_have_a_line_an_arm_and_a_column_a_row_count(tmp_path):
    points = [
        point(rows=1, us=10.04, error=1.7e-3),
        point(rows=8, us=12.0),
        point(rows=8, form="fast", us=11.0),
        {**point(rows=1, form="fast"), "problem": "no kernel"},
        point(rows=8, kernel="32", us=20.0),
    ]
    del points[3]["us"]
    header, body = report.cell_table(points, "us")
    assert header == ["shape", "bits", "codebook", "arm", "m=1", "m=8"]
    lines = {line[3]: line[4:] for line in body}
    assert lines == {
        "exact": ["10.0", "12.0"],
        "fast": ["failed", "11.0"],
        "32 exact": ["", "20.0"],
    }
    assert report.cell_table(points, "error")[1][0][4:] == ["17.0", ""]
    text = report.markdown(header, body).splitlines()
    assert len(text) == 5 and len({line.count("|") for line in text}) == 1


def test_files_are_read_back_and_the_later_reading_counts(tmp_path):
    import json

    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text(json.dumps({"run": {"peers": []}}) + "\n" + json.dumps(point(us=1.0)) + "\n")
    second.write_text(json.dumps(point(us=2.0)) + "\n" + json.dumps(point(rows=8)) + "\n")
    headers, points = report.read_points([first, second])
    assert len(headers) == 1
    assert [(p["rows"], p["us"]) for p in points] == [(1, 2.0), (8, 10.0)]
    second.write_text("{")
    with pytest.raises(ValueError, match=r"b\.jsonl:1"):
        report.read_points([second])
