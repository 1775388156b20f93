"""The storm: an event for every VM, a third of them killed, the same for the same seed."""

from __future__ import annotations

from collections import Counter

from tests.fleet.plan import GROUPS, NOTICE_SECONDS, STORM_SECONDS, plan


def test_every_vm_has_an_event_of_its_own_within_the_storm_and_every_group_one_that_all_see() -> None:
    made = plan(200, 20, seed=1)
    own = [one for one in made.notices if len(one.vms) == 1]
    assert sorted(one.vms[0].name for one in own) == sorted(vm.name for vm in made.vms)
    shared = [one for one in made.notices if len(one.vms) > 1]
    assert {one.vms[0].group: len(one.vms) for one in shared} == dict.fromkeys(GROUPS, 50)
    assert all(0 <= one.at <= STORM_SECONDS for one in made.notices)
    assert len({one.event_id for one in made.notices}) == 204
    assert {one.event_type for one in own} == set(NOTICE_SECONDS)


def test_a_third_of_the_vms_is_killed_each_once() -> None:
    killed = Counter(vm.name for _, vm in plan(200, 20, seed=1).kills)
    assert (len(killed), set(killed.values())) == (66, {1})


def test_the_listeners_are_spread_over_the_groups_and_only_their_events_are_approved() -> None:
    made = plan(200, 20, seed=1)
    assert Counter(vm.group for vm in made.vms if vm.listens) == dict.fromkeys(GROUPS, 5)
    approved = [one for one in made.notices if one.is_approved]
    assert {one.vms[0].name for one in approved} == {vm.name for vm in made.vms if vm.listens}


def test_the_seed_chooses_the_storm() -> None:
    assert plan(8, 2, seed=1) == plan(8, 2, seed=1)
    assert plan(8, 2, seed=1).notices != plan(8, 2, seed=2).notices
