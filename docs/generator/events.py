"""The page of events that the Prefect server gets."""

from __future__ import annotations

from docs.generator.markdown import page, table


def events_page() -> str:
    """Show the events that Prefect gets: what each is about, what it is related to, and its payload."""
    from holdfast.prefect.event_kinds import RESOURCES, rows  # noqa: PLC0415 (the other pages do not need it)

    return page(
        "# Events\n",
        "Holdfast sends these events to the Prefect server. They appear in the event feed of its UI, and automations can react to them.",
        "The resource of an event is the job or node in the column *About*; the resources in *Related to* are attached where they apply.",
        "Notifications that concern only nodes have the cluster as their resource.\n",
        "## Resources\n",
        table(("Role", "Resource id"), *((role, f"`{ident}`") for role, ident in RESOURCES.items())),
        "## Events\n",
        table(("Event", "Meaning", "About", "Related to", "Payload"), *rows()),
    )
