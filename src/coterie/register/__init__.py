"""What records have paid over their lifetime: one register for each user, outside run and state folders.

Every run on a user's own records and every contract of a site reserves its whole plan here before anything is
released, composed with all before it on the same records, and returns what it did not execute when it ends.
It knows digests of records under a secret key and what was charged to them; it reads no data, trains nothing
and sends nothing anywhere.
"""

from coterie.register.data_sets import DataSet
from coterie.register.lines import Lifetime
from coterie.register.place import place
from coterie.register.records import Use
from coterie.register.register import Register, RegisterView, Reservation

__all__ = ["DataSet", "Lifetime", "Register", "RegisterView", "Reservation", "Use", "place"]
