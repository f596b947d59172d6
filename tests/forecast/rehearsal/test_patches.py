# SPDX-License-Identifier: Apache-2.0
"""What is replaced is put back as it was, properties of an owner's own class among it."""

from forecast.rehearsal.patches import Patches


class Meta(type):
    @property
    def world(cls):
        return cls.held

    @world.setter
    def world(cls, value):
        cls.held = value


class Owner(metaclass=Meta):
    held = "before"

    @classmethod
    def name(cls):
        return cls.__name__


class Heir(Owner):
    pass


def test_a_property_of_a_metaclass_and_a_class_method_come_back():
    with Patches() as patches:
        patches.replace(Owner, "world", "rehearsed")
        patches.replace(Owner, "name", lambda: "rehearsed")
        assert (Owner.world, Owner.name()) == ("rehearsed", "rehearsed")
    assert (Owner.world, Owner.name(), Heir.name()) == ("before", "Owner", "Heir")
