"""What fields of a message from an agent may hold: types with their ranges, and the record that they stand in."""

from __future__ import annotations

from typing import Annotated, Final, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

MOST: Final = 2**53
"""Larger than any count of ours; databases hold no number beyond 64 bits."""

Whole = Annotated[int, Field(ge=-MOST, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Digits = Annotated[str, StringConstraints(pattern=r"^\d{1,9}$")]
"""A number as the key of a JSON object."""
Groups = list[list[Count]]


class Record(BaseModel):
    """Fields that a message must have; others are let through."""

    model_config = ConfigDict(extra="allow", strict=True)

    @classmethod
    def of(cls, message: object) -> Self:
        """Return the record in *message*; raise ``ValueError`` that names the first field which is wrong, without its value."""
        try:
            return cls.model_validate(message)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
