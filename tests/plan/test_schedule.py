"""Schedules are counted with the trips of their loops."""

from latte.plan.schedule import Schedules, count_bundles

LISTING = """= control target key start
LB: loop body
= control target key end

     0   :  { %6 = vsyncpa [#allocation3], 0 }
   0x1 LB: > { %s1 = sadd.s32 1, %s2
base_bounds: (512, 2)
 */ }
   0x2 LB: >> { %s3 = sadd.s32 1, %s4 }
   0x3   : {}
   0x4   : >> { %p1 = scmp.ge.s32.totalorder %s3, 16 /* loop exit test */ }
   0x5 LB: >> { %p2 = scmp.ge.s32.totalorder %s5, %s6 /* loop exit test */ }
   0x6 PF: > { %p3 = scmp.ge.s32.totalorder %s1, 34 /* loop exit test */  ;;  %s7 = smov 0 }
   0x7   :  { %8 = vsyncpa [#allocation4], 1 }
"""


def test_bundles_count_with_the_trips_of_their_loops():
    """Two bundles outside; 34 times two, sixteen times three, and a loop of unknown length."""
    issue = count_bundles(LISTING)
    assert issue.bundles == 8
    assert issue.cycles == 2 + 34 * (2 + 16 * 3 + 1)
    assert issue.unbounded == 1


def test_a_schedule_is_found_by_the_whole_name_of_its_instruction(tmp_path):
    (tmp_path / "17-latte.1-01-final_bundles.txt").write_text(LISTING)
    schedule = Schedules(tmp_path)
    assert schedule("latte.1") == count_bundles(LISTING)
    assert schedule("latte") is None
