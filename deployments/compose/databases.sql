-- Beside the database of the history, which POSTGRES_DB names: one for Prefect.
CREATE DATABASE prefect OWNER holdfast;
